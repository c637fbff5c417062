//! Several processes with one cache.

use std::{
    env, fs,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use baton_data::shards::ShardSet;

use crate::{
    kit::{Kit, SHARD, contents, key, options, source},
    proxy::Fault,
};

const ENDPOINT: &str = "SHARDS_TEST_ENDPOINT";
const CACHE: &str = "SHARDS_TEST_CACHE";
const CACHE_BYTES: &str = "SHARDS_TEST_ROOM";
const LEASED_PREFIX: &str = "leased ";

/// Runs in another process: leases shard 0, prints its path, and keeps the lease until its input ends.
#[test]
#[ignore = "other tests start it in a separate process"]
fn another_process() {
    let endpoint = env::var(ENDPOINT).unwrap();
    let cache_bytes = env::var(CACHE_BYTES).unwrap().parse().unwrap();
    let options = options(&endpoint, Path::new(&env::var(CACHE).unwrap()), cache_bytes);
    let shards = ShardSet::open(&source(), &options).unwrap();
    let lease = shards.local(0).unwrap();
    eprintln!("{LEASED_PREFIX}{}", lease.display());
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

fn start(kit: &Kit) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args(["--exact", "processes::another_process", "--ignored", "--nocapture"])
        .env(ENDPOINT, kit.proxy.address.to_string())
        .env(CACHE, kit.cache.path())
        .env(CACHE_BYTES, kit.options.cache_bytes.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Waits until the process has its lease, and returns the path.
fn leased(child: &mut Child) -> PathBuf {
    let mut all = String::new();
    for line in BufReader::new(child.stderr.take().unwrap()).lines() {
        let line = line.unwrap();
        if let Some(path) = line.strip_prefix(LEASED_PREFIX) {
            return PathBuf::from(path);
        }
        all += &format!("{line}\n");
    }
    panic!("the process ended without a lease:\n{all}");
}

fn end(mut child: Child) {
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn several_processes_fetch_a_shard_only_once() {
    let kit = Kit::new(1, 1);
    let shards = kit.open();
    // Slow enough that all processes have started before the download ends.
    kit.proxy.inject(|_| Fault::Trickle(4000));

    let mut children = [start(&kit), start(&kit)];
    let mine = shards.local(0).unwrap();
    let theirs = children.each_mut().map(leased);

    assert_eq!(kit.fetches(0), 1);
    assert!(theirs.iter().all(|path| **path == *mine));
    assert_eq!(fs::read(&mine).unwrap(), contents(0));
    children.into_iter().for_each(end);
}

#[test]
fn the_temporary_file_of_a_killed_process_is_reused_or_removed() {
    for again in [0, 1] {
        let kit = Kit::new(2, 1);
        kit.proxy.inject(|request| match request.range {
            Some(_) => Fault::StallAfter(500),
            None => Fault::None,
        });
        let mut child = start(&kit);
        kit.proxy.wait_for(|log| log.iter().any(|request| request.gets(&key(0))));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(kit.cached_bytes(), SHARD as u64, "its temporary file");
        kit.proxy.inject(|_| Fault::None);

        // Fetching the same shard takes over the temporary file, fetching another one evicts it.
        let shards = kit.open();
        assert_eq!(fs::read(shards.local(again.into()).unwrap()).unwrap(), contents(again));
        assert_eq!(kit.cached_bytes(), SHARD as u64);
    }
}

#[test]
fn a_shard_leased_by_another_process_is_not_evicted() {
    let kit = Kit::new(3, 2);
    let mut child = start(&kit);
    let theirs = leased(&mut child);

    let shards = kit.open();
    drop(shards.local(1).unwrap());
    drop(shards.local(2).unwrap());
    assert_eq!(fs::read(&theirs).unwrap(), contents(0));

    // The lease ends with the process, even if it is killed.
    child.kill().unwrap();
    child.wait().unwrap();
    let _both = [shards.local(1).unwrap(), shards.local(2).unwrap()];
    assert!(!theirs.exists());
}
