//! Saves, crashes, resumes, pruning and exports, through the public interface only.

use std::{
    ffi::OsStr,
    fs,
    num::NonZeroUsize,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use baton_checkpoint::{
    EntryState, Error, GuardedSteps, KeepReason, Manifest, NewerVersion, PruneDecision, RegionInfo,
    RemovalReason, Retention, SaveId, Snapshot, Store, TensorInfo, VERSION,
    export::{self, Float, Weights},
    prune_decisions, slice_of,
};
use baton_job::{
    Generation, Rank,
    message::{Restore, Rollback},
};
use baton_model::Integers;
use baton_recipe::{
    Epoch, Step,
    progress::{Accuracy, Extent, Fit, Progress},
};
use rustix::fs::{CWD, Mode, mkfifoat};

use crate::kit::{
    Fixture, assert_holds, find, find_by, fixture, id, keep, names, newest, saved, sealed, written,
};

fn graded(store: &Store, id: SaveId, top1: f64) {
    let mut manifest = written(store, id, 1);
    manifest.progress.epoch = Epoch(1);
    manifest.progress.evaluated = Some(Epoch(1));
    manifest.progress.last_evaluation = Some(Accuracy::new(8, [("top1", top1)]));
    store.commit(&manifest).unwrap();
}

fn file(f: &Fixture, id: SaveId, name: &str) -> PathBuf {
    f.folder.path().join(id.name()).join(name)
}

/// Auto-resume of a job after rollbacks, each given as (generation after it, first invalidated step).
fn after(rollbacks: &[(u64, u64)]) -> Restore {
    let rollback = |(generation, before): &(u64, u64)| Rollback {
        generation: Generation(*generation),
        before: Step(*before),
        suspect_from: None,
        skip: None,
    };
    Restore { rollbacks: rollbacks.iter().map(rollback).collect(), ..Restore::default() }
}

#[test]
fn state_is_restored_from_any_number_of_shards() {
    let f = fixture();
    for (step, world_size) in [(1, 1), (2, 2), (3, 3), (4, 4), (8, 8)] {
        let manifest = saved(&f.store, id(1, step), world_size);
        assert_holds(&f.store, &manifest);
        assert_eq!(newest(&f.store).manifest, manifest);
    }
    assert_eq!(fs::read_to_string(f.folder.path().join("latest")).unwrap().trim(), id(1, 8).name());
}

#[test]
fn more_ranks_than_values_are_allowed() {
    let f = fixture();
    let manifest = saved(&f.store, id(1, 1), 7);
    assert_holds(&f.store, &manifest);
}

#[test]
fn commit_is_create_only() {
    let f = fixture();
    let manifest = saved(&f.store, id(1, 1), 2);
    let other = Manifest { seed: 2, ..manifest.clone() };
    assert!(matches!(f.store.commit(&other), Err(Error::Exists(_))));
    f.store.commit(&manifest).expect("the same commit again, as after a lost response");
    assert_holds(&f.store, &newest(&f.store).manifest);
}

#[test]
fn shard_of_a_committed_checkpoint_is_not_overwritten() {
    let f = fixture();
    saved(&f.store, id(1, 1), 1);
    let nothing = Snapshot::from_iter([("weights", &[][..])]);
    f.store.write_shard(&id(1, 1), Rank(0), 1, &nothing).expect_err("it is committed");
    assert_holds(&f.store, &newest(&f.store).manifest);
}

#[test]
fn damage_falls_back_to_the_previous_checkpoint_and_names_the_file() {
    type Damage = fn(&Path);
    let shard = "shard-00001-of-00002.safetensors";
    let damages: [(&str, &str, Damage); 9] = [
        ("torn", shard, |p| {
            let b = fs::read(p).unwrap();
            fs::write(p, &b[..b.len() / 2]).unwrap();
        }),
        ("flipped", shard, |p| {
            let mut b = fs::read(p).unwrap();
            let n = b.len();
            b[n / 2] ^= 1;
            fs::write(p, b).unwrap();
        }),
        ("flipped header", shard, |p| {
            let mut b = fs::read(p).unwrap();
            b[6] ^= 0x40;
            fs::write(p, b).unwrap();
        }),
        ("missing", shard, |p| fs::remove_file(p).unwrap()),
        ("zeroed tail", shard, |p| {
            let mut b = fs::read(p).unwrap();
            let n = b.len();
            b[n - 100..].fill(0);
            fs::write(p, b).unwrap();
        }),
        ("grown", shard, |p| {
            let mut b = fs::read(p).unwrap();
            b.push(0);
            fs::write(p, b).unwrap();
        }),
        ("flipped version", "manifest.json", |p| {
            let text = fs::read_to_string(p).unwrap();
            fs::write(p, text.replace(&format!("\"version\": {VERSION}"), "\"version\": 3"))
                .unwrap();
        }),
        ("garbage manifest", "manifest.json", |p| fs::write(p, b"\x00{]").unwrap()),
        ("truncated manifest", "manifest.json", |p| {
            let b = fs::read(p).unwrap();
            fs::write(p, &b[..b.len() / 2]).unwrap();
        }),
    ];
    for (what, name, damage) in damages {
        let f = fixture();
        saved(&f.store, id(1, 10), 2);
        saved(&f.store, id(1, 20), 2);
        damage(&file(&f, id(1, 20), name));
        let found = newest(&f.store);
        assert_eq!(found.manifest.step, Step(10), "{what}");
        let reason = found.skipped.join("\n");
        assert!(reason.contains(&id(1, 20).name()), "{what}: {reason}");
        assert!(reason.contains(name) || reason.contains("manifest"), "{what}: {reason}");
    }
}

#[test]
fn all_checkpoints_damaged_is_an_error_and_not_a_silent_fresh_start() {
    let f = fixture();
    saved(&f.store, id(1, 10), 1);
    fs::remove_file(file(&f, id(1, 10), "shard-00000-of-00001.safetensors")).unwrap();
    match find(&f.store, 0, None) {
        Ok(None) => panic!("starts from scratch without reporting the damaged checkpoint"),
        Ok(Some(_)) => panic!("resumes from a damaged checkpoint"),
        Err(error) => assert!(error.to_string().contains("shard-00000-of-00001"), "{error}"),
    }
}

#[test]
fn commit_without_all_shards_is_refused() {
    let f = fixture();
    let manifest = written(&f.store, id(1, 1), 2);
    fs::remove_file(file(&f, id(1, 1), "shard-00001-of-00002.safetensors")).unwrap();
    let error = f.store.commit(&manifest).expect_err("a node without the shared folder");
    assert!(error.to_string().contains("shard-00001-of-00002"), "{error}");
    assert!(find(&f.store, 0, None).unwrap().is_none());
}

#[test]
fn manifest_that_could_not_be_parsed_again_is_refused() {
    let f = fixture();
    let mut manifest = written(&f.store, id(1, 1), 1);
    manifest.progress.last_evaluation = Some(Accuracy::new(8, [("loss", f64::NAN)]));
    f.store.commit(&manifest).expect_err("JSON has no NaN");
}

#[test]
fn memory_of_a_snapshot_is_reused_for_the_newest_values() {
    let f = fixture();
    let mut snapshot = Snapshot::default();
    let mut addresses = Vec::new();
    for step in 1..4 {
        let slice = snapshot.slice("weights", 1000);
        slice.fill(step as f32);
        addresses.push(slice.as_ptr());
        f.store.write_shard(&id(1, step), Rank(0), 1, &snapshot).unwrap();
        let file =
            f.folder.path().join(id(1, step).name()).join("shard-00000-of-00001.safetensors");
        let bytes = fs::read(file).unwrap();
        assert_eq!(bytes[bytes.len() - 4000..], (step as f32).to_le_bytes().repeat(1000));
    }
    assert!(addresses.iter().all(|address| *address == addresses[0]));
}

#[test]
fn old_generation_is_fenced() {
    let f = fixture();
    saved(&f.store, id(1, 10), 1);
    saved(&f.store, id(1, 20), 1);
    let late = written(&f.store, id(2, 30), 1);
    f.store.raise_fence(Generation(3)).unwrap();
    assert!(matches!(f.store.commit(&late), Err(Error::Fenced { .. })));
    let pruned = f.store.prune(&keep(1, false, 0, 2));
    assert!(pruned.removed.is_empty() && pruned.warnings.len() == 1);
    assert_eq!(newest(&f.store).manifest.step, Step(20));
    saved(&f.store, id(3, 40), 1);
}

#[test]
fn restore_prefers_the_runs_own_checkpoints_then_the_path_then_fresh_weights() {
    let f = fixture();
    assert!(find(&f.store, 0, None).unwrap().is_none());
    saved(&f.store, id(3, 900), 1);
    assert!(find(&f.store, 4, None).unwrap().is_none());
    saved(&f.store, id(4, 100), 1);
    assert_eq!(newest(&f.store).manifest.id(), id(4, 100));
    let by_name = find(&f.store, 5, Some(&id(3, 900).name())).unwrap().unwrap();
    assert_eq!(by_name.manifest.id(), id(3, 900));
    assert_eq!(
        find(&f.store, 4, Some(&id(3, 900).name())).unwrap().unwrap().manifest.id(),
        id(4, 100)
    );

    let other = fixture();
    saved(&other.store, id(1, 7), 1);
    let folder = other.folder.path().join(id(1, 7).name());
    let by_path = find(&f.store, 5, Some(folder.to_str().unwrap())).unwrap().unwrap();
    assert_eq!(by_path.manifest.id(), id(1, 7));
    let error = find(&f.store, 5, Some("/nowhere/step-0000000001-gen-000001")).unwrap_err();
    assert!(error.to_string().contains("/nowhere"), "{error}");
}

#[test]
fn invalidated_checkpoints_are_skipped_and_reported() {
    let f = fixture();
    for step in [10, 20, 30] {
        saved(&f.store, id(1, step), 1);
    }
    let found = find_by(&f.store, &after(&[(2, 30)])).unwrap().unwrap();
    assert_eq!(found.manifest.id(), id(1, 20));
    let name = id(1, 30).name();
    let reason = "training diverged, and generation 2 rolled back to before step 30";
    assert_eq!(found.skipped, [format!("{name} ({reason})")]);

    // Checkpoints of the generation after the rollback are good, unless another rollback invalidates them.
    saved(&f.store, id(2, 30), 1);
    let newest = |rollbacks| find_by(&f.store, &after(rollbacks)).unwrap().unwrap().manifest.id();
    assert_eq!(newest(&[(2, 30)]), id(2, 30));
    assert_eq!(newest(&[(2, 30), (3, 25)]), id(1, 20));
}

#[test]
fn a_newest_checkpoint_that_is_gone_is_reported() {
    let f = fixture();
    saved(&f.store, id(1, 10), 1);
    let found = |step, rollbacks| {
        let last_saved = Some((Generation(1), Step(step)));
        find_by(&f.store, &Restore { last_saved, ..after(rollbacks) }).unwrap().unwrap()
    };
    let skipped = found(30, &[]).skipped;
    let expected = format!("{} (the job has saved it, but it is not in ", id(1, 30).name());
    assert!(skipped.len() == 1 && skipped[0].starts_with(&expected), "{skipped:?}");
    assert_eq!(found(10, &[]).skipped, [""; 0]);
    assert_eq!(found(30, &[(2, 20)]).skipped, [""; 0], "a rollback invalidated it");
}

#[test]
fn if_all_checkpoints_are_invalidated_the_run_restarts_where_it_began() {
    let f = fixture();
    saved(&f.store, id(1, 10), 1);
    written(&f.store, id(1, 20), 1);
    assert!(find_by(&f.store, &after(&[(2, 5)])).unwrap().is_none(), "fresh weights");

    let named = Restore {
        not_before: Generation(2),
        path: Some(id(1, 10).name()),
        ..after(&[(3, 10), (4, 10)])
    };
    saved(&f.store, id(2, 12), 1);
    let found = find_by(&f.store, &named).unwrap().unwrap();
    assert_eq!((found.manifest.id(), found.skipped.len()), (id(1, 10), 1), "the user's checkpoint");
}

#[test]
fn a_store_without_the_checkpoints_that_the_job_has_saved_is_an_error() {
    let f = fixture();
    let last_saved = Some((Generation(1), Step(20)));
    for path in [None, Some(id(1, 10).name())] {
        let error = find_by(&f.store, &Restore { path, last_saved, ..after(&[]) }).unwrap_err();
        let expected = format!(
            "has no checkpoint, but this job has saved {}: mount its disk",
            id(1, 20).name()
        );
        assert!(error.to_string().contains(&expected), "{error}");
    }
    let rolled_back = Restore { last_saved, ..after(&[(2, 5)]) };
    assert!(find_by(&f.store, &rolled_back).unwrap().is_none(), "it was not valid any more");
    saved(&f.store, id(1, 10), 1);
    let found = find_by(&f.store, &Restore { last_saved, ..after(&[]) }).unwrap().unwrap();
    assert_eq!(found.manifest.id(), id(1, 10), "an older one is left");
}

#[test]
fn damage_older_than_an_invalidated_checkpoint_is_still_an_error() {
    let f = fixture();
    saved(&f.store, id(1, 10), 1);
    saved(&f.store, id(1, 20), 1);
    fs::remove_file(file(&f, id(1, 10), "shard-00000-of-00001.safetensors")).unwrap();
    let error = find_by(&f.store, &after(&[(2, 15)])).unwrap_err();
    assert!(error.to_string().contains("shard-00000-of-00001"), "{error}");
}

#[test]
fn invalidated_checkpoints_do_not_count_for_retention() {
    let f = fixture();
    for (step, top1) in [(10, 0.2), (20, 0.3), (30, 0.9), (40, 0.8)] {
        graded(&f.store, id(1, step), top1);
    }
    graded(&f.store, id(2, 15), 0.1);
    let restore = after(&[(2, 30)]);

    let pruned = f.store.prune(&Retention { restore, ..keep(2, true, 0, 2) });

    assert!(pruned.warnings.is_empty(), "{:?}", pruned.warnings);
    assert_eq!(names(&f.store), [id(2, 15), id(1, 20)].map(|id| id.name()));
}

#[test]
fn the_best_checkpoint_of_a_regression_or_of_averaged_weights_is_kept() {
    let f = fixture();
    let fit = |spearman| {
        let fit = Some(Fit { spearman, ..Fit::default() });
        Accuracy::from_legacy_fields(8, 0.0, (0.0, 0.0), fit)
    };
    for (step, raw, ema) in [(10, 0.2, Some(0.9)), (20, 0.8, None), (30, 0.1, None)] {
        let mut manifest = written(&f.store, id(1, step), 1);
        manifest.progress.evaluated = Some(Epoch(0));
        manifest.progress.last_evaluation = Some(fit(raw));
        manifest.progress.last_ema = ema.map(fit);
        f.store.commit(&manifest).unwrap();
    }
    f.store.prune(&keep(1, true, 0, 1));
    assert_eq!(names(&f.store), [id(1, 30), id(1, 10)].map(|id| id.name()));
}

#[test]
fn where_a_change_has_begun_evaluations_anew_the_best_of_each_series_is_kept() {
    let f = fixture();
    let recipe = |overrides: &[&str]| {
        let text = fs::read_to_string("../../recipes/digits_cpu.toml").unwrap();
        let overrides: Vec<String> = overrides.iter().map(|entry| (*entry).to_owned()).collect();
        baton_recipe::JobSpec::from_toml(&text, &overrides).unwrap().to_json()
    };
    let (first, longer) = (recipe(&[]), recipe(&["train.epochs=99"]));
    let other = recipe(&["train.epochs=99", "loss.label_smoothing=0.2"]);
    for (step, top1, recipe) in [
        (10, 0.9, &first),
        (20, 0.8, &longer),
        (30, 0.5, &other),
        (40, 0.6, &other),
        (50, 0.4, &other),
        (60, 0.3, &other),
    ] {
        let mut manifest = written(&f.store, id(1, step), 1);
        manifest.recipe.clone_from(recipe);
        manifest.progress.evaluated = Some(Epoch(0));
        manifest.progress.last_evaluation = Some(Accuracy::new(8, [("top1", top1)]));
        f.store.commit(&manifest).unwrap();
    }
    f.store.prune(&keep(1, true, 0, 1));
    assert_eq!(names(&f.store), [60, 40, 10].map(|step| id(1, step).name()));
}

#[test]
fn retention_keeps_the_last_and_the_best_and_ignores_other_runs() {
    let f = fixture();
    graded(&f.store, id(1, 50), 0.99);
    for (step, top1) in [(10, 0.2), (20, 0.8), (30, 0.8), (40, 0.5), (50, 0.6)] {
        graded(&f.store, id(2, step), top1);
    }
    let pruned = f.store.prune(&keep(2, true, 2, 2));
    assert!(pruned.warnings.is_empty(), "{:?}", pruned.warnings);
    let kept = [id(2, 50), id(2, 40), id(2, 20), id(1, 50)].map(|id| id.name());
    assert_eq!(names(&f.store), kept);
}

#[test]
fn with_the_guard_a_checkpoint_from_before_a_divergence_that_is_not_noticed_yet_is_kept() {
    let kept = |evaluations: bool, evaluated: Option<u64>| {
        let f = fixture();
        for step in [5, 10, 15, 20, 25, 30] {
            let mut manifest = written(&f.store, id(1, step), 1);
            manifest.progress.evaluated_at = evaluated.map(Step);
            f.store.commit(&manifest).unwrap();
        }
        let guard = Some(GuardedSteps { window: 12, evaluations });
        f.store.prune(&Retention { guard, ..keep(1, false, 0, 1) });
        let names = names(&f.store);
        let steps = [5, 10, 15, 20, 25, 30].into_iter();
        steps.filter(|step| names.contains(&id(1, *step).name())).collect::<Vec<_>>()
    };
    assert_eq!(kept(true, None), [15, 20, 30]);
    assert_eq!(kept(true, Some(11)), [10, 15, 20, 30]);
    assert_eq!(kept(true, Some(29)), [15, 20, 25, 30]);
    assert_eq!(kept(true, Some(30)), [15, 20, 30]);
    assert_eq!(kept(false, Some(11)), [15, 20, 30]);
}

fn suspecting(generation: u64, before: u64, suspect: u64) -> Rollback {
    Rollback {
        generation: Generation(generation),
        before: Step(before),
        suspect_from: Some(Step(suspect)),
        skip: None,
    }
}

#[test]
fn a_suspected_checkpoint_is_used_only_if_there_is_no_other_and_kept_after_the_others() {
    let f = fixture();
    for step in [20, 30, 40] {
        saved(&f.store, id(1, step), 1);
    }
    let by =
        |rollbacks: &[Rollback]| Restore { rollbacks: rollbacks.to_vec(), ..Restore::default() };
    let used = |restore: &Restore| {
        let found = f.store.find(restore, &mut |_, _| Ok(())).unwrap().unwrap();
        (found.manifest.id(), found.skipped.len())
    };
    let first = by(&[suspecting(2, 40, 25)]);
    assert_eq!(used(&first), (id(1, 20), 2));
    // The second one suspects all that is left, and the run does not begin anew.
    saved(&f.store, id(2, 25), 1);
    let second = by(&[suspecting(2, 40, 25), suspecting(3, 35, 10)]);
    assert_eq!(used(&second).0, id(1, 20), "the oldest is the least suspect");
    let kept = |restore: &Restore, keep_last: u32| {
        let retention = Retention { restore: restore.clone(), ..keep(keep_last, false, 0, 2) };
        let entries = f.store.list().unwrap();
        let decisions = prune_decisions(&entries, &retention);
        let kept = entries.iter().zip(decisions).filter_map(|(entry, decision)| match decision {
            PruneDecision::Kept(_) => Some(entry.id),
            PruneDecision::Removed(_) => None,
        });
        kept.collect::<Vec<_>>()
    };
    assert_eq!(kept(&first, 2), [id(2, 25), id(1, 20)]);
    assert_eq!(kept(&first, 3), [id(2, 25), id(1, 20)], "30 was rolled back");
    assert_eq!(kept(&second, 1), [id(1, 20)]);
}

#[test]
fn the_checkpoint_that_a_run_went_back_to_as_a_last_resort_outlives_the_next_save() {
    let f = fixture();
    let guard = Some(GuardedSteps { window: 20, evaluations: true });
    let pruned = |rollbacks: &[Rollback], generation: u64| {
        let restore = Restore { rollbacks: rollbacks.to_vec(), ..Restore::default() };
        f.store.prune(&Retention { guard, restore, ..keep(1, false, 0, generation) });
    };
    saved(&f.store, id(1, 22), 1);
    pruned(&[], 1);
    let first = suspecting(2, 27, 8);
    saved(&f.store, id(2, 44), 1);
    pruned(std::slice::from_ref(&first), 2);
    // The newest one has diverged too: the run goes back to the same one.
    let restore = Restore { rollbacks: vec![first, suspecting(3, 44, 23)], ..Restore::default() };
    let found = f.store.find(&restore, &mut |_, _| Ok(())).unwrap().unwrap();
    assert_eq!(found.manifest.id(), id(1, 22));
}

#[test]
fn a_better_score_that_was_rolled_back_does_not_take_the_place_of_the_best() {
    let f = fixture();
    for (generation, step, top1) in [(1, 20, 0.8), (1, 30, 0.95), (2, 25, 0.9), (2, 35, 0.7)] {
        graded(&f.store, id(generation, step), top1);
    }
    let restore = Restore { rollbacks: vec![suspecting(2, 32, 28)], ..Restore::default() };
    for guard in [None, Some(GuardedSteps { window: 4, evaluations: true })] {
        let retention = Retention { guard, restore: restore.clone(), ..keep(1, true, 1, 2) };
        let decisions = prune_decisions(&f.store.list().unwrap(), &retention);
        assert_eq!(decisions[2], PruneDecision::Removed(RemovalReason::Invalidated));
        let PruneDecision::Kept(reasons) = &decisions[1] else { panic!("{decisions:?}") };
        assert!(reasons.contains(&KeepReason::Best), "{decisions:?}");
    }
}

#[test]
fn the_best_state_that_a_run_went_on_from_as_a_last_resort_is_kept() {
    let f = fixture();
    graded(&f.store, id(1, 30), 0.95);
    let mut manifest = written(&f.store, id(2, 45), 1);
    manifest.progress.best = Some((Step(30), Accuracy::new(8, [("top1", 0.95)])));
    f.store.commit(&manifest).unwrap();
    let restore = Restore { rollbacks: vec![suspecting(2, 32, 28)], ..Restore::default() };
    let retention = Retention { restore, ..keep(1, true, 0, 2) };
    let decisions = prune_decisions(&f.store.list().unwrap(), &retention);
    assert_eq!(decisions[1], PruneDecision::Kept(vec![KeepReason::Best]));
}

#[test]
fn a_suspected_checkpoint_takes_the_place_of_no_good_one() {
    let f = fixture();
    let guard = Some(GuardedSteps { window: 5, evaluations: false });
    for step in [40, 42] {
        saved(&f.store, id(1, step), 1);
    }
    // Training went back to step 40, and the loss rises again at step 47.
    let first = suspecting(2, 46, 42);
    for step in 41..=47 {
        saved(&f.store, id(2, step), 1);
        let restore = Restore { rollbacks: vec![first.clone()], ..Restore::default() };
        f.store.prune(&Retention { guard, restore, ..keep(3, false, 0, 2) });
    }
    let restore = Restore { rollbacks: vec![first, suspecting(3, 47, 43)], ..Restore::default() };
    let found = f.store.find(&restore, &mut |_, _| Ok(())).unwrap().unwrap();
    assert!((40..=42).contains(&found.manifest.step.0), "{:?}", found.manifest.id());
    let is_good = restore.suspected_by(found.manifest.generation, found.manifest.step).is_none();
    assert!(is_good, "{:?}", found.manifest.id());
}

#[test]
fn with_the_guard_there_is_a_checkpoint_from_before_its_window_however_often_one_is_saved() {
    for every in [1, 5, 11, 30] {
        let f = fixture();
        let guard = Some(GuardedSteps { window: 12, evaluations: true });
        for step in (1..=4 * 12).map(|number| number * every) {
            saved(&f.store, id(1, step), 1);
            f.store.prune(&Retention { guard, ..keep(1, false, 0, 1) });
            let found = names(&f.store);
            assert!(found.len() <= 3, "{found:?}");
            let steps = found.iter().map(|name| SaveId::parse(name).unwrap().step.0);
            let before_window = steps.filter(|saved| saved + 12 <= step).max();
            let is_near = before_window.is_some_and(|saved| step - saved < 2 * 12 + every);
            assert!(is_near || step < every + 12, "step {step}: {found:?}");
        }
    }
}

/// Commits a checkpoint `cursor` samples after the end of epoch `epoch`.
fn at_epoch(store: &Store, id: SaveId, epoch: u32, cursor: u64) {
    let mut manifest = written(store, id, 1);
    manifest.progress.epoch = Epoch(epoch);
    manifest.progress.cursor = cursor;
    store.commit(&manifest).unwrap();
}

#[test]
fn only_checkpoints_at_the_ends_of_every_n_epochs_are_kept() {
    let f = fixture();
    for (step, epoch, cursor) in
        [(0, 0, 0), (10, 1, 0), (20, 2, 0), (25, 2, 64), (30, 3, 0), (40, 4, 0), (45, 4, 64)]
    {
        at_epoch(&f.store, id(1, step), epoch, cursor);
    }
    f.store.prune(&Retention { keep_every_epochs: 2, ..keep(1, false, 0, 1) });
    assert_eq!(names(&f.store), [id(1, 45), id(1, 40), id(1, 20)].map(|id| id.name()));
    f.store.prune(&keep(1, false, 0, 1));
    assert_eq!(names(&f.store), [id(1, 45).name()], "disabled, so no rule keeps them");
}

#[test]
fn every_checkpoint_gets_the_reasons_why_it_is_kept_or_removed() {
    let f = fixture();
    graded(&f.store, id(1, 50), 0.99);
    for (step, top1) in [(10, 0.3), (20, 0.8), (30, 0.5), (40, 0.6), (60, 0.9)] {
        graded(&f.store, id(2, step), top1);
    }
    graded(&f.store, id(3, 50), 0.7);
    written(&f.store, id(2, 15), 1);
    written(&f.store, id(3, 60), 1);
    fs::remove_file(file(&f, id(2, 10), "shard-00000-of-00001.safetensors")).unwrap();
    let rollback = Restore { not_before: Generation(2), ..after(&[(3, 45)]) };
    let retention = Retention { restore: rollback, keep_every_epochs: 1, ..keep(2, true, 0, 3) };
    let decisions = |retention: &Retention| prune_decisions(&f.store.list().unwrap(), retention);

    let every = KeepReason::EveryEpochs(1);
    assert_eq!(
        decisions(&retention),
        [
            PruneDecision::Kept(vec![KeepReason::InProgress]),
            PruneDecision::Kept(vec![KeepReason::Newest, every]),
            PruneDecision::Removed(RemovalReason::Invalidated),
            PruneDecision::Kept(vec![KeepReason::Last(2), every]),
            PruneDecision::Kept(vec![every]),
            PruneDecision::Kept(vec![KeepReason::Best, every]),
            PruneDecision::Removed(RemovalReason::DeadSave),
            PruneDecision::Kept(vec![KeepReason::Damaged]),
            PruneDecision::Kept(vec![KeepReason::OutsideRun]),
        ]
    );
    let without = Retention { keep_every_epochs: 0, ..retention };
    assert_eq!(decisions(&without)[4], PruneDecision::Removed(RemovalReason::NotAskedFor));
}

#[test]
fn files_of_abandoned_saves_are_removed_and_a_save_in_progress_is_kept() {
    let f = fixture();
    written(&f.store, id(1, 90), 1);
    written(&f.store, id(2, 10), 1);
    saved(&f.store, id(2, 20), 1);
    written(&f.store, id(2, 30), 1);
    f.store.prune(&keep(3, true, 0, 2));
    assert_eq!(names(&f.store), [id(2, 30), id(2, 20)].map(|id| id.name()));
}

#[test]
fn abandoned_saves_with_only_a_temporary_file_or_nothing_are_removed_once() {
    let f = fixture();
    // As after kill -9 in the middle of a shard, and just after the folder was created.
    fs::create_dir(f.folder.path().join(id(1, 5).name())).unwrap();
    fs::write(file(&f, id(1, 5), "shard-00000-of-00001.safetensors#1"), b"half").unwrap();
    fs::create_dir(f.folder.path().join(id(1, 6).name())).unwrap();
    saved(&f.store, id(2, 20), 1);
    f.store.prune(&keep(3, true, 0, 2));
    assert_eq!(names(&f.store), [id(2, 20).name()]);
    assert!(f.store.prune(&keep(3, true, 0, 2)).removed.is_empty());
}

#[test]
fn abandoned_saves_of_another_run_are_removed_too() {
    let f = fixture();
    written(&f.store, id(1, 90), 1);
    saved(&f.store, id(4, 20), 1);
    f.store.prune(&keep(3, true, 4, 4));
    assert_eq!(names(&f.store), [id(4, 20).name()]);
}

#[test]
fn a_newer_format_is_reported_and_neither_skipped_nor_damaged_nor_removed() {
    let f = fixture();
    saved(&f.store, id(1, 10), 1);
    saved(&f.store, id(1, 20), 1);
    let path = file(&f, id(1, 20), "manifest.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json["version"] = 99.into();
    fs::write(&path, sealed(json)).unwrap();
    let supported = VERSION;
    let version = format!(
        "written by a newer Baton (format 99; this one reads up to {supported}): use that version"
    );

    let Err(error) = find(&f.store, 0, None) else {
        panic!("an old program must not lose ten steps")
    };
    let name = id(1, 20).name();
    assert_eq!(
        error.to_string(),
        format!("checkpoint {name} was {version}, or name another checkpoint")
    );
    let by_name = find(&f.store, 2, Some(&id(1, 10).name())).unwrap().unwrap();
    assert_eq!(by_name.manifest.id(), id(1, 10));

    let entries = f.store.list().unwrap();
    assert_eq!(entries[0].state, EntryState::Newer(NewerVersion { found: 99, supported }));
    assert_eq!(entries[0].state.problem().unwrap(), version);
    let retention = keep(1, false, 0, 2);
    assert_eq!(
        prune_decisions(&entries, &retention)[0],
        PruneDecision::Kept(vec![KeepReason::Newer])
    );
    f.store.prune(&retention);
    assert_eq!(names(&f.store), [id(1, 20), id(1, 10)].map(|id| id.name()));
}

#[test]
fn a_named_pipe_in_place_of_a_manifest_or_a_shard_is_damage_and_nothing_waits_for_it() {
    let (f, to) = (fixture(), fixture());
    let good = saved(&f.store, id(1, 10), 1);
    let shardless = saved(&f.store, id(1, 20), 1);
    let without_manifest = saved(&f.store, id(1, 30), 1);
    let pipe = |f: &Fixture, id: SaveId, name: &str| {
        let path = file(f, id, name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
    };
    let shard = &shardless.shards[0].file;
    pipe(&f, id(1, 30), "manifest.json");
    pipe(&f, id(1, 20), shard);

    let states: Vec<_> = f.store.list().unwrap().into_iter().map(|entry| entry.state).collect();
    let manifest_problem = "its manifest.json is not a regular file";
    assert_eq!(states[0], EntryState::Damaged(manifest_problem.to_owned()));
    assert_eq!(states[1], EntryState::Damaged(format!("{shard} is missing")));
    assert!(matches!(states[2], EntryState::Complete(_)), "{:?}", states[2]);
    for (damaged, problem) in [(&without_manifest, manifest_problem), (&shardless, "is missing")] {
        let error = f.store.manifest(&damaged.name()).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{error}");
        assert!(error.to_string().contains(problem), "{error}");
    }
    let verified = f.store.verify(&[&shardless], NonZeroUsize::MIN, &|_| {});
    let error = verified[0].as_ref().unwrap_err();
    assert!(error.to_string().contains("not a regular file"), "{error}");
    assert_eq!(newest(&f.store).manifest, good);

    // A copy replaces such a shard and takes such a manifest for another checkpoint.
    pipe(&to, id(1, 10), &good.shards[0].file);
    f.store.copy_to(&good, &to.store, &|_| {}).unwrap();
    assert_holds(&to.store, &good);
    pipe(&to, id(1, 10), "manifest.json");
    let error = f.store.copy_to(&good, &to.store, &|_| {}).unwrap_err();
    assert!(error.to_string().contains("not a regular file"), "{error}");

    f.store.raise_fence(Generation(2)).unwrap();
    for damaged in [id(1, 30), id(1, 20)] {
        f.store.discard(damaged).unwrap();
    }
    assert_eq!(names(&f.store), [id(1, 10).name()]);
}

#[test]
fn files_of_other_people_whose_names_are_not_utf_8_change_nothing() {
    let f = fixture();
    saved(&f.store, id(1, 1), 2);
    let foreign = OsStr::from_bytes(b"caf\xe9.txt");
    fs::write(f.folder.path().join(foreign), "").unwrap();
    fs::create_dir(f.folder.path().join(OsStr::from_bytes(b"caf\xe9"))).unwrap();
    fs::write(f.folder.path().join(id(1, 1).name()).join(foreign), "").unwrap();

    f.store.raise_fence(Generation(2)).unwrap();
    let second = saved(&f.store, id(2, 2), 2);
    saved(&f.store, id(2, 3), 2);
    assert_eq!(names(&f.store), [id(2, 3), id(2, 2), id(1, 1)].map(|id| id.name()));
    let pruned = f.store.prune(&keep(2, false, 1, 2));
    assert!(pruned.warnings.is_empty(), "{:?}", pruned.warnings);
    assert_eq!(pruned.removed, [id(1, 1).name()]);
    assert!(!f.folder.path().join(id(1, 1).name()).exists(), "with everything in it");
    assert!(f.folder.path().join(foreign).exists());
    assert_holds(&f.store, &second);
}

#[test]
fn false_values_in_a_manifest_are_damage_and_never_a_crash() {
    type Change = fn(&mut serde_json::Value);
    let changes: [(&str, Change); 9] = [
        ("huge region", |m| m["regions"][0]["len"] = u64::MAX.into()),
        ("longer region", |m| m["regions"][2]["len"] = 100_000_000.into()),
        ("region twice", |m| {
            let r = m["regions"][0].clone();
            m["regions"][1] = r;
        }),
        ("no shards", |m| {
            m["shards"] = serde_json::json!([]);
            m["world_size"] = 0.into();
        }),
        ("many ranks", |m| m["world_size"] = u32::MAX.into()),
        ("path outside", |m| m["shards"][0]["file"] = "../x".into()),
        ("no digest", |m| m["shards"][0]["blake3"] = "".into()),
        (
            "tensor outside",
            |m| m["tensors"] = serde_json::json!([{"name": "t", "shape": [u64::MAX, 2], "region": "weights", "offset": 1, "channels_last": false}]),
        ),
        ("huge shard", |m| m["shards"][0]["bytes"] = u64::MAX.into()),
    ];
    for (what, change) in changes {
        let f = fixture();
        saved(&f.store, id(1, 10), 1);
        saved(&f.store, id(1, 20), 1);
        let path = file(&f, id(1, 20), "manifest.json");
        let mut json: serde_json::Value =
            serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut json);
        fs::write(&path, sealed(json)).unwrap();
        let found = newest(&f.store);
        assert_eq!(found.manifest.step, Step(10), "{what}");
        assert_eq!(found.skipped.len(), 1, "{what}");
        assert!(!found.skipped[0].contains("digest") || what == "no digest", "{:?}", found.skipped);
    }
}

#[test]
fn folder_that_cannot_be_created_is_refused_with_path_and_remedy() {
    let f = fixture();
    let file = f.folder.path().join("file");
    fs::write(&file, b"").unwrap();
    let below = file.join("sub");
    let error = Store::open(below.to_str().unwrap()).unwrap_err().to_string();
    assert!(error.contains(below.to_str().unwrap()) && error.contains("checkpoint.dir"), "{error}");
    assert!(Store::open_existing("/nowhere/at/all").is_err());
}

#[test]
fn many_processes_may_open_one_store_at_once() {
    let f = fixture();
    let location = f.folder.path().to_str().unwrap();
    // Ranks in different containers may have equal process ids; threads of one process simulate this.
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..50).for_each(|_| drop(Store::open(location).unwrap())));
        }
    });
}

#[test]
fn store_may_be_dropped_in_async_code() {
    let f = fixture();
    let store = Store::open_existing(f.folder.path().to_str().unwrap()).unwrap();
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(async move { drop(store) });
}

/// A checkpoint of one kernel in channels-last order and two statistics; each average is 1,000 larger.
fn written_for_export(f: &Fixture, shape: &[usize], stored: &[f32]) -> Manifest {
    let mut manifest = written(&f.store, id(1, 42), 2);
    let more = |values: &[f32]| values.iter().map(|value| value + 1_000.0).collect::<Vec<_>>();
    let statistics = [0.25, 0.75];
    let regions = [
        ("weights", stored.to_vec()),
        ("ema", more(stored)),
        ("bn_running", statistics.to_vec()),
        ("bn_running_ema", more(&statistics)),
    ];
    let info =
        |(name, values): &(&str, Vec<f32>)| RegionInfo { name: (*name).into(), len: values.len() };
    manifest.regions = regions.iter().map(info).collect();
    manifest.shards = (0..2)
        .map(Rank)
        .map(|rank| {
            let slices = regions.iter();
            let snapshot: Snapshot = slices
                .map(|(name, values)| (*name, &values[slice_of(values.len(), rank, 2)]))
                .collect();
            f.store.write_shard(&id(1, 42), rank, 2, &snapshot).unwrap()
        })
        .collect();
    let tensor = |name: &str, shape: &[usize], region: &str, channels_last| TensorInfo {
        name: name.into(),
        shape: shape.to_vec(),
        region: region.into(),
        offset: 0,
        channels_last,
        integers: None,
    };
    manifest.tensors = vec![
        tensor("conv1.weight", shape, "weights", true),
        tensor("bn1.running_mean", &[2], "bn_running", false),
    ];
    f.store.commit(&manifest).unwrap();
    manifest
}

fn exported(shape: &[usize], stored: &[f32], weights: Weights) -> Vec<u8> {
    let f = fixture();
    let manifest = written_for_export(&f, shape, stored);
    let out = f.folder.path().join("model.safetensors");
    export::safetensors_as(Float::F32, &f.store, &manifest, weights, &out).unwrap();
    fs::read(out).unwrap()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn export_permutes_channels_last_and_counts_batches() {
    // Value = 100·o + 10·i + position, stored OHWI.
    let stored: Vec<f32> = (0..2)
        .flat_map(|o| (0..4).flat_map(move |p| (0..3).map(move |i| (100 * o + 10 * i + p) as f32)))
        .collect();
    let expected: Vec<f32> = (0..2)
        .flat_map(|o| (0..3).flat_map(move |i| (0..4).map(move |p| (100 * o + 10 * i + p) as f32)))
        .collect();
    for shape in [vec![2, 3, 2, 2], vec![2, 3, 4]] {
        let file = exported(&shape, &stored, Weights::Raw);
        let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
        let conv = tensors.tensor("conv1.weight").unwrap();
        assert_eq!(conv.shape(), shape);
        assert_eq!(floats(conv.data()), expected, "{shape:?}");
        assert_eq!(floats(tensors.tensor("bn1.running_mean").unwrap().data()), [0.25, 0.75]);
        let counted = tensors.tensor("bn1.num_batches_tracked").unwrap();
        assert_eq!((counted.dtype(), counted.shape().len()), (safetensors::Dtype::I64, 0));
        assert_eq!(counted.data(), 42_i64.to_le_bytes());
    }
}

#[test]
fn an_export_in_half_precision_rounds_every_float_tensor_to_nearest() {
    // Halfway between two 16-bit values: rounded to the even one, up or down.
    let stored = [1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0];
    let f = fixture();
    let manifest = written_for_export(&f, &[4], &stored);
    let cast = |float| {
        let out = f.folder.path().join("model.safetensors");
        export::safetensors_as(float, &f.store, &manifest, Weights::Raw, &out).unwrap();
        fs::read(out).unwrap()
    };
    let words = |bytes: &[u8]| -> Vec<u16> {
        bytes.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect()
    };
    let file = cast(Float::F16);
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let conv = tensors.tensor("conv1.weight").unwrap();
    assert_eq!(words(conv.data()), [0x3c00, 0x3c02, 0x3c04, 0x3c0c]);
    let mean = tensors.tensor("bn1.running_mean").unwrap();
    assert_eq!((mean.dtype(), words(mean.data())), (safetensors::Dtype::F16, vec![0x3400, 0x3a00]));
    let counted = tensors.tensor("bn1.num_batches_tracked").unwrap();
    assert_eq!(counted.data(), 42_i64.to_le_bytes());

    let file = cast(Float::Bf16);
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let conv = tensors.tensor("conv1.weight").unwrap();
    assert_eq!(conv.dtype(), safetensors::Dtype::BF16);
    assert_eq!(words(conv.data()), [0x3f80, 0x3f80, 0x3f80, 0x3f82]);
}

#[test]
fn an_export_keeps_the_type_and_the_values_of_integers_whatever_the_floats_become() {
    let f = fixture();
    let mut manifest = written_for_export(&f, &[3], &[2989.0, -70_001.0, 16_777_216.0]);
    let mut file_of = |integers: Integers| {
        manifest.tensors[0].integers = Some(integers);
        let out = f.folder.path().join("model.safetensors");
        export::safetensors_as(Float::F16, &f.store, &manifest, Weights::Raw, &out).unwrap();
        fs::read(out).unwrap()
    };
    for (integers, dtype, expected) in [
        (
            Integers::I64,
            safetensors::Dtype::I64,
            [2989i64, -70_001, 16_777_216].map(i64::to_le_bytes).concat(),
        ),
        (
            Integers::I32,
            safetensors::Dtype::I32,
            [2989i32, -70_001, 16_777_216].map(i32::to_le_bytes).concat(),
        ),
        (Integers::Bool, safetensors::Dtype::BOOL, vec![1, 1, 1]),
    ] {
        let file = file_of(integers);
        let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
        let exported = tensors.tensor("conv1.weight").unwrap();
        assert_eq!((exported.dtype(), exported.data()), (dtype, expected.as_slice()));
        assert_eq!(tensors.tensor("bn1.running_mean").unwrap().dtype(), safetensors::Dtype::F16);
    }
}

#[test]
fn a_tensor_without_values_is_saved_and_exported_although_its_region_has_none_either() {
    let f = fixture();
    let mut manifest = written(&f.store, id(1, 42), 1);
    manifest.tensors = vec![TensorInfo {
        name: "bounds".into(),
        shape: vec![2, 0],
        region: "frozen".into(),
        offset: 0,
        channels_last: false,
        integers: None,
    }];
    f.store.commit(&manifest).unwrap();
    let out = f.folder.path().join("model.safetensors");
    export::safetensors_as(Float::F32, &f.store, &manifest, Weights::Raw, &out).unwrap();
    let file = fs::read(out).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let bounds = tensors.tensor("bounds").unwrap();
    assert_eq!((bounds.shape(), bounds.data()), (&[2, 0][..], &[][..]));
}

#[test]
fn a_value_too_large_for_half_precision_is_refused_and_reported() {
    let f = fixture();
    let manifest = written_for_export(&f, &[1], &[70_000.0]);
    let out = f.folder.path().join("model.safetensors");
    let cast = |float| export::safetensors_as(float, &f.store, &manifest, Weights::Raw, &out);
    let refused = cast(Float::F16).unwrap_err().to_string();
    assert!(refused.contains("70000 in conv1.weight is too large for F16"), "{refused}");
    assert!(!out.exists());
    cast(Float::Bf16).unwrap();
}

#[test]
fn an_export_of_a_damaged_checkpoint_is_refused() {
    let f = fixture();
    let manifest = written_for_export(&f, &[1], &[1.0]);
    let shard = file(&f, manifest.id(), &manifest.shards[0].file);
    let mut bytes = fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(shard, bytes).unwrap();
    let out = f.folder.path().join("model.safetensors");
    let refused =
        export::safetensors_as(Float::F32, &f.store, &manifest, Weights::Raw, &out).unwrap_err();
    assert!(refused.to_string().contains("does not match its digest"), "{refused}");
    assert!(!out.exists());
}

#[test]
fn export_without_tensors_is_refused() {
    let f = fixture();
    let manifest = saved(&f.store, id(1, 1), 1);
    let out = f.folder.path().join("model.safetensors");
    assert!(export::safetensors_as(Float::F32, &f.store, &manifest, Weights::Raw, &out).is_err());
    assert!(!out.exists());
}

#[test]
fn averages_are_exported_under_the_same_names_or_reported_as_missing() {
    let file = exported(&[1, 1, 1, 2], &[1.0, 2.0], Weights::Averaged);
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    assert_eq!(floats(tensors.tensor("conv1.weight").unwrap().data()), [1_001.0, 1_002.0]);
    let mean = tensors.tensor("bn1.running_mean").unwrap();
    assert_eq!(floats(mean.data()), [1_000.25, 1_000.75]);

    let f = fixture();
    let mut manifest = written_for_export(&f, &[1, 1, 1, 2], &[1.0, 2.0]);
    manifest.regions.retain(|region| !region.name.contains("ema"));
    let out = f.folder.path().join("model.safetensors");
    let refused = export::safetensors_as(Float::F32, &f.store, &manifest, Weights::Averaged, &out)
        .unwrap_err();
    assert!(refused.to_string().contains("no [ema]"), "{refused}");
}

#[test]
fn listing_shows_each_state_newest_first() {
    let f = fixture();
    saved(&f.store, id(1, 10), 1);
    saved(&f.store, id(1, 20), 1);
    written(&f.store, id(1, 30), 1);
    fs::create_dir(f.folder.path().join("notes")).unwrap();
    fs::write(file(&f, id(1, 20), "manifest.json"), b"x").unwrap();
    let states: Vec<EntryState> =
        f.store.list().unwrap().into_iter().map(|entry| entry.state).collect();
    assert!(matches!(
        states.as_slice(),
        [EntryState::Unfinished, EntryState::Damaged(_), EntryState::Complete(_)]
    ));
}

// ---- evaluations that follow the commit ----

/// The position after an evaluation of `manifest`'s state.
fn evaluated(manifest: &Manifest, top1: f64) -> Progress {
    let mut progress = manifest.progress.clone();
    let accuracy = Accuracy::new(8, [("top1", top1)]);
    progress.record_evaluation(accuracy, None, Extent::Full);
    progress
}

fn top1(manifest: &Manifest) -> Option<f64> {
    manifest.accuracy()?.get("top1")
}

/// A checkpoint at the end of an epoch, before its evaluation.
fn at_epoch_end(store: &Store, id: SaveId) -> Manifest {
    at_epoch(store, id, 1, 0);
    store.manifest(&id.name()).unwrap()
}

#[test]
fn an_evaluation_after_the_commit_belongs_to_the_checkpoint_and_its_copies() {
    let f = fixture();
    let manifest = at_epoch_end(&f.store, id(1, 8));
    assert_eq!(top1(&manifest), None);
    f.store.add_evaluation(id(1, 8), &evaluated(&manifest, 0.5), Generation(1)).unwrap();
    assert_eq!(newest(&f.store).manifest.progress, evaluated(&manifest, 0.5));
    // On the whole set, after a subset.
    f.store.add_evaluation(id(1, 8), &evaluated(&manifest, 0.75), Generation(2)).unwrap();
    let manifest = newest(&f.store).manifest;
    assert_eq!(top1(&manifest), Some(0.75));
    assert_holds(&f.store, &manifest);

    let copy = fixture();
    f.store.copy_to(&manifest, &copy.store, &|_| {}).unwrap();
    assert_eq!(newest(&copy.store).manifest, manifest);
}

#[test]
fn a_checkpoint_is_as_good_as_its_later_evaluation() {
    let f = fixture();
    for (step, top1) in [(8, 0.5), (16, 0.9), (24, 0.6)] {
        let manifest = at_epoch_end(&f.store, id(1, step));
        f.store.add_evaluation(id(1, step), &evaluated(&manifest, top1), Generation(1)).unwrap();
    }
    f.store.prune(&keep(1, true, 0, 1));
    assert_eq!(names(&f.store), [id(1, 24).name(), id(1, 16).name()]);
    let gone = f.folder.path().join(id(1, 8).name());
    assert!(!gone.exists(), "its evaluation is removed with it");
}

#[test]
fn a_damaged_or_foreign_evaluation_leaves_the_checkpoint_not_evaluated() {
    let f = fixture();
    let manifest = at_epoch_end(&f.store, id(1, 8));
    let progress = evaluated(&manifest, 0.5);
    f.store.add_evaluation(id(1, 8), &progress, Generation(1)).unwrap();
    let path = file(&f, id(1, 8), "evaluation.json");
    let good = fs::read_to_string(&path).unwrap();
    let state = || {
        let manifest = newest(&f.store).manifest;
        assert_holds(&f.store, &manifest);
        top1(&manifest)
    };
    assert_eq!(state(), Some(0.5));
    for damaged in [&good.replace("0.5", "0.6"), &good[..good.len() / 2], ""] {
        fs::write(&path, damaged).unwrap();
        assert_eq!(state(), None, "{damaged}");
    }
    let other = Progress { step: Step(9), ..progress.clone() };
    f.store.add_evaluation(id(1, 8), &other, Generation(1)).unwrap();
    assert_eq!(state(), None, "an evaluation of another step");
    fs::remove_file(&path).unwrap();
    mkfifoat(CWD, &path, Mode::RUSR).unwrap();
    assert_eq!(state(), None, "a named pipe, and nothing waits for it");
}

#[test]
fn an_evaluation_is_added_only_to_a_checkpoint_and_not_by_a_replaced_generation() {
    let f = fixture();
    let manifest = written(&f.store, id(1, 8), 1);
    f.store.add_evaluation(id(1, 8), &evaluated(&manifest, 0.5), Generation(1)).unwrap();
    assert!(!file(&f, id(1, 8), "evaluation.json").exists(), "the checkpoint is not committed");
    f.store.commit(&manifest).unwrap();
    f.store.raise_fence(Generation(2)).unwrap();
    let late = f.store.add_evaluation(id(1, 8), &evaluated(&manifest, 0.5), Generation(1));
    assert!(matches!(late, Err(Error::Fenced { .. })), "{late:?}");
    assert!(!file(&f, id(1, 8), "evaluation.json").exists());
}
