//! Several processes, one cache.

use std::{
    env, fs,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use baton_data::shards::ShardSet;

use crate::{
    kit::{Kit, SHARD, contents, key, options, source},
    proxy::Harm,
};

const ENDPOINT: &str = "SHARDS_TEST_ENDPOINT";
const CACHE: &str = "SHARDS_TEST_CACHE";
const ROOM: &str = "SHARDS_TEST_ROOM";
const SAYS: &str = "leased ";

/// What another process does: it leases shard 0, says so, and keeps it until its input ends.
#[test]
#[ignore = "other tests start it, as a process of its own"]
fn another_process() {
    let Ok(endpoint) = env::var(ENDPOINT) else { return };
    let room = env::var(ROOM).unwrap().parse().unwrap();
    let options = options(&endpoint, Path::new(&env::var(CACHE).unwrap()), room);
    let shards = ShardSet::open(&source(), &options).unwrap();
    let lease = shards.local(0).unwrap();
    eprintln!("{SAYS}{} {}", shards.statistics().fetched_shards, lease.display());
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

fn start(kit: &Kit) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args(["--exact", "processes::another_process", "--ignored", "--nocapture"])
        .env(ENDPOINT, kit.proxy.address.to_string())
        .env(CACHE, kit.cache.path())
        .env(ROOM, kit.options.cache_bytes.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Waits until it has its lease: how many shards it fetched for it, and where it is.
fn leased(child: &mut Child) -> (u64, PathBuf) {
    let mut all = String::new();
    for line in BufReader::new(child.stderr.take().unwrap()).lines() {
        let line = line.unwrap();
        if let Some((fetched, path)) = line.strip_prefix(SAYS).and_then(|said| said.split_once(' '))
        {
            return (fetched.parse().unwrap(), PathBuf::from(path));
        }
        all += &format!("{line}\n");
    }
    panic!("it ended without a lease:\n{all}");
}

fn end(mut child: Child) {
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn processes_fetch_a_shard_once_between_them() {
    let kit = Kit::new(1, 1);
    let shards = kit.open();
    // Slow enough for all to be there before it is done.
    kit.proxy.harm(|_| Harm::Trickle(4000));

    let mut children = [start(&kit), start(&kit)];
    let mine = shards.local(0).unwrap();
    let theirs = children.each_mut().map(leased);

    assert_eq!(kit.fetches(0), 1);
    let fetched = theirs.iter().map(|(fetched, _)| fetched).sum::<u64>();
    assert_eq!(fetched + shards.statistics().fetched_shards, 1);
    assert!(theirs.iter().all(|(_, path)| **path == *mine));
    assert_eq!(fs::read(&mine).unwrap(), contents(0));
    children.into_iter().for_each(end);
}

#[test]
fn a_process_killed_in_the_middle_of_a_download_leaves_nothing_in_the_way() {
    for again in [0, 1] {
        let kit = Kit::new(2, 1);
        kit.proxy.harm(|request| match request.range {
            Some(_) => Harm::StallAfter(500),
            None => Harm::None,
        });
        let mut child = start(&kit);
        kit.proxy.wait_for(|log| log.iter().any(|request| request.gets(&key(0))));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(kit.cached_bytes(), SHARD as u64, "its temporary file");
        kit.proxy.harm(|_| Harm::None);

        // The same shard takes the temporary file over, another needs its room.
        let shards = kit.open();
        assert_eq!(fs::read(shards.local(again.into()).unwrap()).unwrap(), contents(again));
        assert_eq!(kit.cached_bytes(), SHARD as u64);
    }
}

#[test]
fn what_another_process_leases_stays() {
    let kit = Kit::new(3, 2);
    let mut child = start(&kit);
    let (_, theirs) = leased(&mut child);

    let shards = kit.open();
    drop(shards.local(1).unwrap());
    drop(shards.local(2).unwrap());
    assert_eq!(fs::read(&theirs).unwrap(), contents(0));

    // When it ends, however it ends, so does its lease.
    child.kill().unwrap();
    child.wait().unwrap();
    let _both = [shards.local(1).unwrap(), shards.local(2).unwrap()];
    assert!(!theirs.exists());
}
