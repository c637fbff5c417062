//! Requirements for every kind of store: a folder, memory, and a bucket, also with injected faults.

use std::{num::NonZeroUsize, time::Duration};

use baton_checkpoint::{
    BucketAccess, EntryState, Error, Manifest, RegionInfo, SaveId, Snapshot, Store,
};
use baton_fake_s3::{Fault, Server};
use baton_job::{Generation, Rank};
use tempfile::TempDir;

use crate::kit::{assert_holds, draft, find, id, keep, names, newest, saved, snapshot, written};

fn access(server: &Server) -> BucketAccess {
    BucketAccess {
        environment: server.environment(),
        request_timeout: Duration::from_secs(30),
        retry_timeout: Duration::from_secs(10),
    }
}

fn store_on(server: &Server, access: &BucketAccess) -> Store {
    Store::open_with(&server.location(), access).unwrap()
}

/// Runs a test on every kind of store.
fn on_every_store(test: fn(&Store)) {
    let folder = TempDir::new().unwrap();
    test(&Store::open(folder.path().to_str().unwrap()).unwrap());
    let folder = TempDir::new().unwrap();
    test(&Store::open_without_links(folder.path().to_str().unwrap()).unwrap());
    test(&Store::memory().unwrap());
    let server = Server::start();
    test(&store_on(&server, &access(&server)));
    for fault in [Fault::Internal, Fault::Throttled, Fault::ResponseLost] {
        let server = Server::start();
        let store = store_on(&server, &access(&server));
        server.faults(fault, 3);
        test(&store);
    }
}

#[test]
fn state_is_restored_from_any_number_of_shards() {
    on_every_store(|store| {
        for (step, world_size) in [(1, 1), (2, 2), (4, 5)] {
            let manifest = saved(store, id(1, step), world_size);
            assert_holds(store, &manifest);
            store.verify(&[&manifest], NonZeroUsize::MIN, &|_| {}).pop().unwrap().unwrap();
            assert_eq!(newest(store).manifest, manifest);
            assert_eq!(store.manifest(&manifest.name()).unwrap(), manifest);
        }
        assert_eq!(names(store), [id(1, 4), id(1, 2), id(1, 1)].map(|id: SaveId| id.name()));
        assert!(find(store, 2, None).unwrap().is_none());
        assert!(matches!(store.manifest(&id(1, 3).name()), Err(Error::Missing { .. })));
    });
}

#[test]
fn a_commit_is_create_only_and_may_be_repeated() {
    on_every_store(|store| {
        let manifest = saved(store, id(1, 10), 2);
        store.commit(&manifest).unwrap();
        let other = Manifest { seed: 99, ..manifest.clone() };
        assert!(matches!(store.commit(&other), Err(Error::Exists(_))));
        let shard = store.write_shard(&id(1, 10), Rank(0), 2, &snapshot(11, 0, 2));
        assert!(matches!(shard, Err(Error::Exists(_))));
        assert_eq!(newest(store).manifest, manifest);
        assert_holds(store, &manifest);
    });
}

#[test]
fn a_commit_says_whether_the_store_has_lost_its_fence() {
    on_every_store(|store| {
        store.raise_fence(Generation(1)).unwrap();
        assert!(!store.commit(&written(store, id(1, 10), 2)).unwrap().fence_lost);
        // As if another disk were at its place.
        assert!(store.commit(&written(store, id(2, 20), 2)).unwrap().fence_lost);
    });
}

#[test]
fn a_failed_save_leaves_nothing_and_a_committed_one_stays() {
    let folder = TempDir::new().unwrap();
    let store = Store::open(folder.path().to_str().unwrap()).unwrap();
    let committed = saved(&store, id(1, 5), 2);
    written(&store, id(1, 10), 2);
    for save in [id(1, 5), id(1, 10)] {
        store.discard_shard(save, Rank(0), 2);
        assert!(folder.path().join(save.name()).is_dir(), "the shard of rank 1 is there");
        store.discard_shard(save, Rank(1), 2);
    }
    assert!(!folder.path().join(id(1, 10).name()).exists());
    assert_holds(&store, &committed);
}

#[test]
fn a_commit_without_all_shards_is_refused() {
    on_every_store(|store| {
        let first = store.write_shard(&id(1, 10), Rank(0), 2, &snapshot(10, 0, 2)).unwrap();
        let mut second = first.clone();
        (second.rank, second.file) = (Rank(1), "shard-00001-of-00002.safetensors".into());
        let refused = store.commit(&draft(id(1, 10), 2, vec![first, second])).unwrap_err();
        assert!(refused.to_string().contains("shard-00001-of-00002"), "{refused}");
        assert!(find(store, 0, None).unwrap().is_none());
    });
}

#[test]
fn pruning_applies_retention_and_removes_abandoned_saves() {
    on_every_store(|store| {
        written(store, id(1, 5), 2);
        for step in [10, 20, 30] {
            saved(store, id(1, step), 2);
        }
        let running = written(store, id(1, 40), 1);
        let pruned = store.prune(&keep(2, false, 0, 1));
        assert!(pruned.warnings.is_empty(), "{:?}", pruned.warnings);
        assert_eq!(names(store), [id(1, 40), id(1, 30), id(1, 20)].map(|id: SaveId| id.name()));
        store.commit(&running).unwrap();
        assert_holds(store, &newest(store).manifest);
    });
}

#[test]
fn an_old_generation_is_fenced() {
    on_every_store(|store| {
        assert_eq!(store.fence().unwrap(), Generation(0));
        saved(store, id(1, 10), 1);
        let late = written(store, id(1, 20), 2);
        for generation in [2, 3, 1] {
            store.raise_fence(Generation(generation)).unwrap();
        }
        assert_eq!(store.fence().unwrap(), Generation(3));
        assert!(matches!(store.commit(&late), Err(Error::Fenced { .. })));
        let shard = store.write_shard(&id(2, 30), Rank(0), 1, &snapshot(30, 0, 1));
        assert!(matches!(shard, Err(Error::Fenced { .. })));
        assert_eq!(store.prune(&keep(1, false, 0, 2)).warnings.len(), 1);
        let states: Vec<_> = store.list().unwrap().into_iter().map(|entry| entry.state).collect();
        assert!(matches!(states.as_slice(), [EntryState::Unfinished, EntryState::Complete(_)]));

        saved(store, id(3, 20), 1);
        let pruned = store.prune(&keep(1, false, 0, 3));
        assert!(pruned.warnings.is_empty(), "{:?}", pruned.warnings);
        assert_eq!(names(store), [id(3, 20).name()]);
        let refused = store.commit(&late);
        assert!(matches!(refused, Err(Error::Fenced { .. })), "also after its shards were pruned");
    });
}

#[test]
fn a_large_shard_is_written_and_read_in_parts() {
    on_every_store(|store| {
        // 18 MB: two parts.
        let values: Vec<f32> = (0..4_500_000).map(|i| i as f32).collect();
        let snapshot = Snapshot::from_iter([("weights", values.as_slice())]);
        let shard = store.write_shard(&id(1, 10), Rank(0), 1, &snapshot).unwrap();
        let regions = vec![RegionInfo { name: "weights".into(), len: values.len() }];
        let manifest = Manifest { regions, ..draft(id(1, 10), 1, vec![shard]) };
        store.commit(&manifest).unwrap();
        let mut loaded = Vec::new();
        let mut take = |_: &str, _: usize, values: &[f32]| loaded.extend_from_slice(values);
        store.load(&manifest, &[&manifest.shards[0]], NonZeroUsize::MIN, &mut take).unwrap();
        assert!(loaded == values);
    });
}

#[test]
fn requests_without_a_response_are_retried() {
    let server = Server::start();
    let mut access = access(&server);
    access.request_timeout = Duration::from_millis(500);
    let store = store_on(&server, &access);
    server.faults(Fault::Stalled, 6);
    let manifest = saved(&store, id(1, 10), 2);
    assert_holds(&store, &manifest);
    assert_eq!(newest(&store).manifest, manifest);
}

#[test]
fn all_objects_are_below_the_prefix_and_no_uploads_are_left() {
    let server = Server::start();
    let store = store_on(&server, &access(&server));
    saved(&store, id(1, 10), 1);
    let keys: Vec<String> = server.objects().into_iter().map(|(key, _)| key).collect();
    let folder = format!("runs/first/{}", id(1, 10).name());
    let shard = format!("{folder}/shard-00000-of-00001.safetensors");
    assert_eq!(keys, ["runs/first/latest".into(), format!("{folder}/manifest.json"), shard]);
    assert_eq!(server.unfinished_uploads(), 0);
    assert_eq!(store.location(), server.location());
}

#[test]
fn a_store_inside_a_checkpoint_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let name = "step-0000000088-gen-000001";
    let inside = folder.path().join(name).join("tuned");
    for location in [inside.to_str().unwrap(), &format!("s3://bucket/runs/{name}")] {
        let error = Store::open(location).unwrap_err();
        let problem = format!("{location}: it is inside checkpoint {name}, and would be removed");
        assert!(error.to_string().contains(&problem) && error.is_bad_input(), "{error}");
    }
    assert!(!inside.exists());
    Store::open(folder.path().join("step-88-gen-1").to_str().unwrap()).unwrap();
}

#[test]
fn an_unusable_bucket_is_reported_in_one_line_with_a_remedy() {
    let server = Server::start();
    let refused = |location: &str, name: &str, value: &str| {
        let mut access = access(&server);
        access.retry_timeout = Duration::from_millis(200);
        access.environment.push((name.to_owned(), value.to_owned()));
        let error = Store::open_with(location, &access).unwrap_err().to_string();
        assert!(!error.contains('\n') && error.contains(location), "{error}");
        error
    };
    let wrong_key = refused(&server.location(), "AWS_SECRET_ACCESS_KEY", "wrong");
    assert!(wrong_key.contains("check AWS_ACCESS_KEY_ID"), "{wrong_key}");
    let no_bucket = refused("s3://nowhere/runs", "AWS_REGION", "eu-west-1");
    assert!(no_bucket.contains("check the name of the bucket"), "{no_bucket}");
    assert!(no_bucket.contains("NoSuchBucket") && !no_bucket.contains('<'), "{no_bucket}");
    // A port that was just closed.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://user:secret@{port}");
    let no_server = refused(&server.location(), "AWS_ENDPOINT_URL", &url);
    assert!(
        no_server.contains("check the network") && !no_server.contains("secret"),
        "{no_server}"
    );
    let no_url = refused(&server.location(), "AWS_ENDPOINT_URL", "nonsense");
    assert!(no_url.contains("AWS_ENDPOINT_URL = \"nonsense\" is not a URL"), "{no_url}");
    let no_name = refused("s3:///runs", "AWS_REGION", "eu-west-1");
    assert!(no_name.contains("the bucket name is missing"), "{no_name}");
}
