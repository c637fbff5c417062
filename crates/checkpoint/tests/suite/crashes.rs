//! A save is killed at every single operation of its store; files are damaged at any position.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use baton_checkpoint::{EntryState, Error, Float, Manifest, SaveId, Store};
use baton_job::{Generation, Rank};
use futures::StreamExt;
use object_store::{ObjectStore, local::LocalFileSystem, memory::InMemory};
use proptest::prelude::*;
use tempfile::TempDir;

use crate::kit::{
    assert_holds, draft, find,
    hook::{Hook, Hooked, InjectedResult, OperationKind},
    id, keep, newest, saved, snapshot, written,
};

/// What happens to the operations after the one that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AfterFault {
    /// The process is dead: they fail too.
    Dies,
    /// The fault was transient: they succeed.
    Continues,
}

/// Two ranks write, rank 0 commits and prunes. Returns whether the commit succeeded.
fn save(store: &Store) -> bool {
    let write = |rank| store.write_shard(&id(1, 20), Rank(rank), 2, &snapshot(20, rank, 2));
    let Ok(shards) = (0..2).map(write).collect::<Result<Vec<_>, Error>>() else { return false };
    let Ok(frozen) = store.write_frozen(&id(1, 20), "frozen", Float::F32, vec![20.0; 8]) else {
        return false;
    };
    let manifest = Manifest { frozen: vec![frozen], ..draft(id(1, 20), 2, shards) };
    let is_committed = store.commit(&manifest).is_ok();
    if is_committed {
        store.prune(&keep(1, false, 0, 1));
    }
    is_committed
}

/// Injects `outcome` into operation number `at` of a save. Returns the number of operations.
fn crash(
    objects: Arc<dyn ObjectStore>,
    at: usize,
    outcome: InjectedResult,
    after: AfterFault,
) -> usize {
    let what = format!("{outcome:?} at {at}, then {after:?}");
    let plain = Store::from_object_store("plain", objects.clone()).unwrap();
    saved_with(&plain, id(1, 5), 10.0);
    saved_with(&plain, id(1, 10), 10.0);

    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    let hook = Hook::new(move |operation| {
        let is_overwrite = operation.kind == OperationKind::Put;
        match counted.fetch_add(1, Ordering::SeqCst) {
            // Only overwrites can be torn: the other operations are atomic.
            now if now == at && outcome == InjectedResult::Torn && !is_overwrite => {
                InjectedResult::FailsBefore
            }
            now if now == at => outcome,
            now if now > at && after == AfterFault::Dies => InjectedResult::FailsBefore,
            _ => InjectedResult::Succeeds,
        }
    });
    let hooked =
        Store::from_object_store("hooked", Arc::new(Hooked::new(objects.clone(), hook))).unwrap();
    let is_committed = save(&hooked);

    let found = newest(&plain);
    assert!(found.skipped.is_empty(), "{what}: {:?}", found.skipped);
    assert!(found.manifest.id() >= id(1, 10), "{what}: {:?}", found.manifest.id());
    assert!(!is_committed || found.manifest.id() == id(1, 20), "{what}: a commit was lost");
    assert_holds(&plain, &found.manifest);
    let frozen = if found.manifest.id() == id(1, 20) { 20.0 } else { 10.0 };
    assert_eq!(plain.read_region(&found.manifest, "frozen").unwrap(), [frozen; 8], "{what}");

    // The next generation cleans up and continues.
    plain.raise_fence(Generation(2)).unwrap();
    assert_eq!(newest(&plain).manifest, found.manifest, "{what}");
    let next = saved_with(&plain, id(2, 30), 20.0);
    let pruned = plain.prune(&keep(1, false, 0, 2));
    assert!(pruned.warnings.is_empty(), "{what}: {:?}", pruned.warnings);
    let entries = plain.list().unwrap();
    assert!(
        matches!(entries.as_slice(), [only] if only.state == EntryState::Complete(Box::new(next))),
        "{what}: {entries:?}"
    );
    let EntryState::Complete(next) = &entries[0].state else { return 0 };
    assert_eq!(plain.read_region(next, "frozen").unwrap(), [20.0; 8], "{what}");
    assert_eq!(frozen_files(&*objects), 1, "{what}: unused frozen files are removed");
    count.load(Ordering::SeqCst)
}

/// A checkpoint with a frozen region.
fn saved_with(store: &Store, id: SaveId, frozen: f32) -> Manifest {
    let manifest = written(store, id, 2);
    let frozen = store.write_frozen(&id, "frozen", Float::F32, vec![frozen; 8]).unwrap();
    let manifest = Manifest { frozen: vec![frozen], ..manifest };
    store.commit(&manifest).unwrap();
    manifest
}

fn frozen_files(objects: &dyn ObjectStore) -> usize {
    let files = objects.list(Some(&"frozen".into()));
    futures::executor::block_on(files.count())
}

fn crash_everywhere(objects: impl Fn() -> Arc<dyn ObjectStore>) {
    let count = crash(objects(), usize::MAX, InjectedResult::Succeeds, AfterFault::Continues);
    assert!(count >= 20, "a save of only {count} operations");
    for outcome in [InjectedResult::FailsBefore, InjectedResult::FailsAfter, InjectedResult::Torn] {
        for after in [AfterFault::Dies, AfterFault::Continues] {
            for at in 0..count {
                crash(objects(), at, outcome, after);
            }
        }
    }
}

#[test]
fn a_save_killed_at_any_operation_loses_only_that_save() {
    crash_everywhere(|| Arc::new(InMemory::new()));
}

#[test]
fn a_save_killed_in_a_folder_loses_only_that_save() {
    let root = TempDir::new().unwrap();
    crash_everywhere(|| {
        let folder = tempfile::tempdir_in(root.path()).unwrap().keep();
        let files = LocalFileSystem::new_with_prefix(folder).unwrap();
        Arc::new(files.with_automatic_cleanup(true))
    });
}

#[derive(Clone, Copy, Debug)]
enum Damage {
    TornTail,
    ZeroedTail,
    FlippedBit(u8),
}

impl Damage {
    fn apply(self, bytes: &mut Vec<u8>, position: usize) {
        match self {
            Self::TornTail => bytes.truncate(position),
            Self::ZeroedTail => bytes[position..].fill(0),
            Self::FlippedBit(bit) => bytes[position] ^= 1 << bit,
        }
    }
}

fn any_damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        Just(Damage::TornTail),
        Just(Damage::ZeroedTail),
        (0u8..8).prop_map(Damage::FlippedBit),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn damage_at_any_position_falls_back_to_the_previous_checkpoint(
        damage in any_damage(),
        file in 0usize..3,
        position: prop::sample::Index,
    ) {
        let folder = TempDir::new().unwrap();
        let files = LocalFileSystem::new_with_prefix(folder.path()).unwrap();
        let store = Store::from_object_store("folder", Arc::new(files)).unwrap();
        let good = saved(&store, id(1, 10), 2);
        saved(&store, id(1, 20), 2);
        let names = [
            "shard-00000-of-00002.safetensors",
            "shard-00001-of-00002.safetensors",
            "manifest.json",
        ];
        let path = folder.path().join(id(1, 20).name()).join(names[file]);
        let whole = fs::read(&path).unwrap();
        let mut bytes = whole.clone();
        damage.apply(&mut bytes, position.index(whole.len()));
        prop_assume!(bytes != whole);
        fs::write(&path, bytes).unwrap();

        let found = newest(&store);

        prop_assert_eq!(&found.manifest, &good);
        prop_assert_eq!(found.skipped.len(), 1);
        let reason = &found.skipped[0];
        prop_assert!(reason.starts_with(&id(1, 20).name()), "{}", reason);
        let is_named = reason.contains(names[file]) || reason.contains("version");
        prop_assert!(is_named || reason.contains("manifest"), "{}", reason);
    }
}

#[test]
fn a_bucket_that_does_not_respond_is_not_damage() {
    let objects = Arc::new(InMemory::new());
    let plain = Store::from_object_store("plain", objects.clone()).unwrap();
    saved(&plain, id(1, 10), 1);
    saved(&plain, id(1, 20), 1);
    for file in ["manifest.json", "shard-00000-of-00001.safetensors"] {
        let lost = format!("{}/{file}", id(1, 20).name());
        let hook = Hook::new(move |operation| match operation.kind {
            OperationKind::Get if operation.path == lost => InjectedResult::FailsBefore,
            _ => InjectedResult::Succeeds,
        });
        let hooked = Arc::new(Hooked::new(objects.clone(), hook));
        let store = Store::from_object_store("s3://bucket/runs", hooked).unwrap();
        let error = find(&store, 0, None).expect_err("a network failure must not lose ten steps");
        assert!(error.to_string().contains("check the network"), "{error}");
        assert_eq!(store.list().is_err(), file == "manifest.json");
    }
}

#[test]
fn a_full_disk_is_reported_in_one_line_with_a_remedy() {
    let is_shard = |path: &str| path.ends_with(".safetensors");
    let hook = Hook::new(move |operation| match operation.kind {
        OperationKind::Put if is_shard(&operation.path) => InjectedResult::DiskFull,
        _ => InjectedResult::Succeeds,
    });
    let store = Arc::new(Hooked::new(Arc::new(InMemory::new()), hook));
    let store = Store::from_object_store("/data/checkpoints", store).unwrap();
    let error = store.write_shard(&id(1, 10), Rank(0), 1, &snapshot(10, 0, 1)).unwrap_err();
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    for part in ["/data/checkpoints", "shard-00000-of-00001", "free some disk space"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// Gives up root's right to ignore permissions, for this thread and those that it starts.
fn obey_permissions() {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::DAC_OVERRIDE);
    set_capabilities(None, sets).unwrap();
}

#[test]
fn a_read_only_folder_is_reported_in_one_line_with_a_remedy() {
    use std::os::unix::fs::PermissionsExt;
    obey_permissions();
    let folder = TempDir::new().unwrap();
    let store = Store::open(folder.path().to_str().unwrap()).unwrap();
    let manifest = written(&store, id(1, 10), 1);
    let saves = folder.path().join(id(1, 10).name());
    let allow = |mode| {
        for path in [folder.path(), &saves] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    allow(0o555);
    fs::write(folder.path().join("probe"), b"").unwrap_err();
    let opened = Store::open(folder.path().to_str().unwrap());
    let committed = store.commit(&manifest);
    allow(0o755);
    for error in [opened.unwrap_err().to_string(), committed.unwrap_err().to_string()] {
        assert!(!error.contains('\n'), "{error}");
        assert!(error.contains(folder.path().to_str().unwrap()), "{error}");
        assert!(
            error.contains("checkpoint.dir") || error.contains("may read and write"),
            "{error}"
        );
    }
}
