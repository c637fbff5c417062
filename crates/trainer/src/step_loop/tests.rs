use std::path::Path;

use baton_checkpoint::Claimant;
use baton_data::{Batch, InputType};
use baton_job::message::{Commit, Rollback, SaveProblem};
use baton_recipe::{Epoch, guard::LossWatch, progress::Progress};
use object_store::{
    memory::InMemory,
    throttle::{ThrottleConfig, ThrottledStore},
};

use super::*;
use crate::{
    BatchEvaluation, EvaluatedWeights, Update,
    kit::recipe,
    learner::{Region, TensorLocation},
    linear::LinearLearner,
    local,
    torch::{Device, TorchLearner, device},
};

fn trainer(store: &str) -> Trainer<LinearLearner> {
    trainer_with(store, &[])
}

fn trainer_with(store: &str, overrides: &[&str]) -> Trainer<LinearLearner> {
    trainer_on(Store::open(store).unwrap(), overrides)
}

fn trainer_on(store: Store, overrides: &[&str]) -> Trainer<LinearLearner> {
    trainer_of(JobId::default(), store, overrides)
}

fn trainer_of(job: JobId, store: Store, overrides: &[&str]) -> Trainer<LinearLearner> {
    let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/digits/digits-val.beton");
    let of_all = [
        "model.arch=linear",
        &format!("data={{ train='{digits}', val='{digits}' }}"),
        "train={ epochs=1, global_batch=90, resolution=8, virtual_ranks=2 }",
        "optimizer={ kind='sgd' }",
    ];
    let spec = Arc::new(recipe(&of_all, overrides));
    let inputs = JobInputs::open(&spec, Path::new("")).unwrap();
    let store = Arc::new(store);
    let job = TrainingJob { id: job, spec: spec.clone(), store, local: None, inputs };
    Trainer::new(job, Box::new(move || LinearLearner::new(&spec, &InputType::Image))).unwrap()
}

type RunResult = (Result<Outcome, Error>, Vec<RankReport>);

/// Runs one generation of all ranks.
fn run_all(
    trainers: &mut [Trainer<LinearLearner>],
    generation: Generation,
    restore: &Restore,
) -> Vec<RunResult> {
    let world_size = u32::try_from(trainers.len()).unwrap();
    let group = local::group(world_size, Duration::from_secs(60));
    let run = |trainer: &mut Trainer<LinearLearner>, mut collective| {
        let collective: &mut local::LocalCollective = &mut collective;
        let mut reports = Vec::new();
        let ended = trainer.run(&mut GenerationContext {
            generation,
            collective,
            restore,
            controls: &Controls::default(),
            report: &mut |report| reports.push(report),
        });
        (ended, reports)
    };
    std::thread::scope(|scope| {
        let members = trainers.iter_mut().zip(group);
        let threads: Vec<_> = members
            .map(|(trainer, collective)| scope.spawn(move || run(trainer, collective)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs one generation of one rank.
fn run_alone(
    trainer: &mut Trainer<LinearLearner>,
    generation: Generation,
    restore: &Restore,
) -> RunResult {
    run_all(std::slice::from_mut(trainer), generation, restore).remove(0)
}

fn committed(reports: &[RankReport]) -> Vec<&Commit> {
    reports
        .iter()
        .filter_map(|report| match report {
            RankReport::Saved(commit) => Some(commit),
            _ => None,
        })
        .collect()
}

/// A store whose writes are so slow that many updates are made meanwhile.
fn slow_store() -> Store {
    let slow = ThrottleConfig {
        wait_put_per_call: Duration::from_millis(300),
        ..ThrottleConfig::default()
    };
    let objects = ThrottledStore::new(InMemory::new(), slow);
    Store::from_object_store("slow memory", Arc::new(objects)).unwrap()
}

#[test]
fn training_continues_while_a_checkpoint_is_written_and_none_is_skipped() {
    let overrides = ["train.epochs=3", "checkpoint.keep_last=99"];
    let mut trainer = trainer_on(slow_store(), &overrides);
    let (ended, reports) = run_alone(&mut trainer, Generation(1), &Restore::default());
    assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");

    let waits = reports.iter().filter_map(|report| match report {
        RankReport::SaveWaits { step, behind, .. } => Some((*step, *behind)),
        _ => None,
    });
    // The whole second epoch was trained meanwhile.
    assert_eq!(waits.collect::<Vec<_>>(), [(Step(8), Step(4)), (Step(12), Step(8))]);
    let saved = committed(&reports);
    let steps: Vec<Step> = saved.iter().map(|commit| commit.step).collect();
    assert_eq!(steps, [Step(4), Step(8), Step(12)]);
    for commit in saved {
        let took = commit.took.unwrap();
        assert!(took.stall_seconds < 0.1 && took.seconds > 0.3, "{took:?}");
    }
}

#[test]
fn the_wait_for_a_slow_store_is_not_a_ranks_own_work() {
    let saves = ["train.epochs=2", "checkpoint.every_steps=1", "checkpoint.keep_last=99"];
    let mut trainer = trainer_on(slow_store(), &saves);
    let controls = Controls::default();
    let ended = trainer.run(&mut GenerationContext {
        generation: Generation(1),
        collective: &mut local::group(1, Duration::from_secs(60))[0],
        restore: &Restore::default(),
        controls: &controls,
        report: &mut |_| {},
    });
    assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
    // Each step waits for the save of the one before.
    let own = controls.activity().heartbeat().own_step_seconds;
    assert!(own < 0.1, "{own}");
}

/// A store that removes slowly.
fn slowly_removing_store() -> Store {
    let slow = ThrottleConfig {
        wait_delete_per_call: Duration::from_millis(200),
        ..ThrottleConfig::default()
    };
    let objects = ThrottledStore::new(InMemory::new(), slow);
    Store::from_object_store("slow memory", Arc::new(objects)).unwrap()
}

fn checkpoint_names(store: &Store) -> Vec<String> {
    store.list().unwrap().into_iter().map(|checkpoint| checkpoint.name).collect()
}

#[test]
fn a_rollback_finds_the_same_checkpoints_however_slow_their_removal_is() {
    let saves =
        ["checkpoint.every_steps=1", "checkpoint.keep_last=1", "checkpoint.keep_best=false"];
    let overrides = [&EXPLODING[..], &saves].concat();
    let left_by = |store: Store| {
        let mut trainer = trainer_on(store, &overrides);
        let (ended, reports) = run_alone(&mut trainer, Generation(1), &Restore::default());
        assert!(matches!(ended, Err(Error::Diverged(_))), "{ended:?}");
        let left = checkpoint_names(&trainer.job.store);
        assert!(left.len() < committed(&reports).len(), "some are removed: {left:?}");
        left
    };
    let left = left_by(Store::memory().unwrap());
    assert_eq!(left_by(slowly_removing_store()), left);
}

#[test]
fn training_does_not_wait_for_the_removal_of_old_checkpoints_but_the_end_of_the_job_does() {
    let overrides = ["train.epochs=3", "checkpoint.keep_last=1"];
    let mut trainer = trainer_on(slowly_removing_store(), &overrides);
    let store = Arc::clone(&trainer.job.store);
    let mut there = Vec::new();
    let ended = trainer.run(&mut GenerationContext {
        generation: Generation(1),
        collective: &mut local::group(1, Duration::from_secs(60))[0],
        restore: &Restore::default(),
        controls: &Controls::default(),
        report: &mut |report| {
            if matches!(report, RankReport::Saved(_)) {
                there.push(checkpoint_names(&store).len());
            }
        },
    });
    assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
    assert_eq!(there, [1, 2, 3]);
    assert_eq!(checkpoint_names(&store), ["step-0000000012-gen-000001"]);
}

fn claimant(job: JobId) -> Claimant {
    Claimant {
        owner: "lost".to_owned(),
        job,
        name: String::new(),
        recipe: String::new(),
        host: String::new(),
        run_dir: String::new(),
        not_before: None,
    }
}

#[test]
fn ranks_that_have_no_coordinator_save_last_as_the_generation_that_it_has_claimed() {
    let store = Store::memory().unwrap();
    store.claim(Generation(2), &claimant(JobId::default())).unwrap();
    let mut trainer = trainer_on(store, &["checkpoint.every_epochs=0"]);
    trainer.last_save_pauses = [Duration::from_millis(1); 4];
    let controls = Controls::default();
    let (mut failures, mut saved) = (0, Vec::new());
    let ended = trainer.run(&mut GenerationContext {
        generation: Generation(1),
        collective: &mut local::group(1, Duration::from_secs(60))[0],
        restore: &Restore::default(),
        controls: &controls,
        report: &mut |report| match report {
            RankReport::SaveFailed(SaveProblem { fence, .. }) => {
                assert_eq!(fence, Some(Generation(2)));
                failures += 1;
                // As long as there is a coordinator, it opens that generation with these ranks.
                controls.set_coordinator_lost(failures == 3);
            }
            RankReport::Saved(commit) => saved.push((commit.generation, commit.step)),
            _ => {}
        },
    });
    assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
    assert_eq!((failures, saved), (3, vec![(Generation(2), Step(4))]));
}

#[test]
fn ranks_do_not_save_as_a_generation_of_another_job_or_one_further_on() {
    let another = JobId("5f0c8d5e-0000-4000-8000-000000000000".parse().unwrap());
    for (job, fence, may) in [
        (JobId::default(), Generation(2), true),
        (another, Generation(2), false),
        (JobId::default(), Generation(3), false),
    ] {
        let store = Store::memory().unwrap();
        store.claim(fence, &claimant(job)).unwrap();
        let trainer = trainer_on(store, &[]);
        let controls = Controls::default();
        controls.set_coordinator_lost(true);
        let problem = SaveProblem { fence: Some(fence), ..SaveProblem::default() };
        let context = &mut GenerationContext {
            generation: Generation(1),
            collective: &mut local::group(1, Duration::from_secs(60))[0],
            restore: &Restore::default(),
            controls: &controls,
            report: &mut |_| {},
        };
        assert_eq!(trainer.may_save_as_next(&problem, context).unwrap(), may, "{job} {fence}");
        controls.set_saves_alone();
        assert!(!trainer.may_save_as_next(&problem, context).unwrap(), "a lone rank");
    }
}

/// A rank that leaves alone may have saved just before this one.
#[test]
fn a_last_state_that_another_rank_has_committed_is_saved() {
    let store = Arc::new(Store::memory().unwrap());
    let controls = Controls::default();
    controls.request_stop("notice".to_owned());
    let committed = [0; 2].map(|_| {
        let (mut saved, mut failures) = (None, 0);
        let mut trainer = trainer_on(Store::memory().unwrap(), &["checkpoint.every_epochs=0"]);
        trainer.last_save_pauses = [Duration::from_millis(1); 4];
        trainer.job.store = Arc::clone(&store);
        let ended = trainer.run(&mut GenerationContext {
            generation: Generation(1),
            collective: &mut local::group(1, Duration::from_secs(60))[0],
            restore: &Restore { not_before: Generation(2), ..Restore::default() },
            controls: &controls,
            report: &mut |report| match report {
                RankReport::SaveFailed(_) => failures += 1,
                RankReport::Saved(commit) => saved = Some(commit.name),
                _ => {}
            },
        });
        assert!(matches!(ended, Ok(Outcome::Drained { .. })), "{ended:?}");
        (saved.unwrap(), failures)
    });
    let name = || "step-0000000000-gen-000001".to_owned();
    assert_eq!(committed, [(name(), 0), (name(), 1)]);
}

#[test]
fn failed_save_is_reported_and_a_later_one_succeeds() {
    let folder = tempfile::tempdir().unwrap();
    // A file where the folder of the first checkpoint would be.
    std::fs::write(folder.path().join("step-0000000004-gen-000001"), "in the way").unwrap();
    let location = folder.path().to_str().unwrap();
    let mut trainer = trainer_with(location, &["train.epochs=3"]);
    let (ended, reports) = run_alone(&mut trainer, Generation(1), &Restore::default());
    assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
    let index = |kind: fn(&RankReport) -> bool| reports.iter().position(kind);
    let failed = index(|report| matches!(report, RankReport::SaveFailed(_))).unwrap();
    let saved = index(|report| matches!(report, RankReport::Saved(_))).unwrap();
    assert!(failed < saved, "{reports:?}");
    let RankReport::SaveFailed(SaveProblem { message, fence: None, exists: false }) =
        &reports[failed]
    else {
        panic!()
    };
    assert!(message.contains("step-0000000004-gen-000001"), "{message}");
}

/// A job whose last save, at step 4, finds a file where the checkpoint's folder should be. `mend` gets the number of failed
/// saves, the store's folder and that file after each of them. Returns the outcome and the number of failed saves.
fn last_save_fails(mend: impl Fn(usize, &Path, &Path)) -> (Result<Outcome, Error>, usize) {
    let folder = tempfile::tempdir().unwrap();
    let in_the_way = folder.path().join("step-0000000004-gen-000001");
    std::fs::write(&in_the_way, "").unwrap();
    let mut trainer = trainer(folder.path().to_str().unwrap());
    trainer.last_save_pauses = [Duration::from_millis(1); 4];
    let mut failed = 0;
    let ended = trainer.run(&mut GenerationContext {
        generation: Generation(1),
        collective: &mut local::group(1, Duration::from_secs(60)).remove(0),
        restore: &Restore::default(),
        controls: &Controls::default(),
        report: &mut |report| {
            if matches!(report, RankReport::SaveFailed(_)) {
                failed += 1;
                mend(failed, folder.path(), &in_the_way);
            }
        },
    });
    (ended, failed)
}

#[test]
fn the_last_save_is_tried_until_the_store_can_be_written_because_the_state_would_be_lost() {
    // The periodic save of this step fails first, and counts as an attempt.
    let (ended, failed) = last_save_fails(|failed, _, in_the_way| {
        if failed == 50 {
            std::fs::remove_file(in_the_way).unwrap();
        }
    });
    assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
    assert_eq!(failed, 50);
}

#[test]
fn the_state_is_kept_while_the_store_expects_a_newer_generation() {
    let (ended, failed) = last_save_fails(|failed, store, in_the_way| {
        if failed == 3 {
            std::fs::remove_file(in_the_way).unwrap();
            let store = Store::open(store.to_str().unwrap()).unwrap();
            store.raise_fence(Generation(2)).unwrap();
        }
        if failed == 20 {
            std::fs::remove_dir_all(store.join("fences")).unwrap();
        }
    });
    assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
    assert_eq!(failed, 20);
}

fn digits(set: &str) -> String {
    format!("{}/../../assets/digits/digits-{set}.beton", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_resume_with_other_data_is_refused_unless_changes_are_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let location = folder.path().join("store");
    let [train, val] = ["train.beton", "val.beton"].map(|name| folder.path().join(name));
    let data = [("train", &train), ("val", &val)];
    let data = data.map(|(set, path)| format!("data.{set}='{}'", path.display()));
    let resume_of = |job: JobId, generation: u64, restore: &Restore| {
        let store = Store::open(location.to_str().unwrap()).unwrap();
        let mut trainer = trainer_of(job, store, &[&data[0], &data[1]]);
        run_alone(&mut trainer, Generation(generation), restore).0
    };
    let resume = |generation, restore: &Restore| resume_of(JobId::default(), generation, restore);
    let refused =
        |generation: u64| resume(generation, &Restore::default()).unwrap_err().to_string();
    std::fs::copy(digits("val"), &train).unwrap();
    std::fs::copy(digits("val"), &val).unwrap();
    resume(1, &Restore::default()).unwrap();
    resume(2, &Restore::default()).unwrap();

    let mut bytes = std::fs::read(&val).unwrap();
    let pixel = bytes.len() / 2;
    bytes[pixel] ^= 1;
    std::fs::write(&val, &bytes).unwrap();
    let error = refused(3);
    let expected =
        format!("the validation set {} has other contents of the same size", val.display());
    assert!(error.contains(&expected), "{error}");
    std::fs::copy(digits("train"), &train).unwrap();
    let error = refused(4);
    let expected = format!("the training set {} has 1437 samples instead of 360", train.display());
    assert!(error.contains(&expected), "{error}");
    let allowed = Restore { allow_recipe_change: true, ..Restore::default() };
    let error = resume(5, &allowed).unwrap_err().to_string();
    assert!(error.contains(&expected), "the run's own checkpoints were allowed by nobody: {error}");
    assert!(matches!(resume_of(another_job(), 6, &allowed), Ok(Outcome::Completed)));
}

/// A run that continues with the checkpoints of [`JobId::default`].
fn another_job() -> JobId {
    JobId("00000000-0000-0000-0000-000000000001".parse().unwrap())
}

#[test]
fn ranks_with_different_data_do_not_train_together() {
    let store = tempfile::tempdir().unwrap();
    let mut trainers = ["val", "train"].map(|set| {
        let data = format!("data.train='{}'", digits(set));
        trainer_with(store.path().to_str().unwrap(), &[&data])
    });
    let ended = run_all(&mut trainers, Generation(1), &Restore::default());
    for (ended, _) in ended {
        let error = ended.unwrap_err();
        assert_eq!(error.failure().class, baton_job::exit::Class::BadInput);
        let text = error.to_string();
        let expected = "differs between ranks: rank 1 has 1437 samples instead of 360, compared with rank 0; \
                        give all nodes the same files";
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn a_newcomer_with_different_data_fails_alone_and_the_others_keep_their_state() {
    let store = tempfile::tempdir().unwrap();
    // The newcomers are rank 0 and 2: the ranks that hold the state decide, not the first.
    let mut trainers = ["train", "val", "train"].map(|set| {
        let data = format!("data.train='{}'", digits(set));
        trainer_with(store.path().to_str().unwrap(), &[&data])
    });
    run_alone(&mut trainers[1], Generation(1), &Restore::default()).0.unwrap();
    let reached = trainers[1].step();
    assert!(reached > Some(Step(0)));

    let ended = run_all(&mut trainers, Generation(2), &Restore::default());
    let errors = ended.into_iter().map(|(ended, _)| ended.unwrap_err());
    let failures: Vec<_> = errors.map(|error| (error.is_peer_loss(), error.failure())).collect();
    for newcomer in [0, 2] {
        let (survives, failure) = &failures[newcomer];
        assert_eq!((*survives, failure.class), (false, baton_job::exit::Class::BadInput));
        let expected =
            format!("rank {newcomer} has 1437 samples instead of 360, compared with rank 1;");
        assert!(failure.message.contains(&expected), "{failure:?}");
        assert_eq!(trainers[newcomer].step(), None);
    }
    let (survives, failure) = &failures[1];
    assert!(survives, "{failure:?}");
    assert!(failure.message.starts_with("rank 0 cannot take part: "), "{failure:?}");
    assert_eq!(trainers[1].step(), reached);
}

#[test]
fn checkpoint_of_another_recipe_is_refused_with_the_difference_unless_changes_are_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let location = folder.path().to_str().unwrap();
    run_alone(&mut trainer(location), Generation(1), &Restore::default()).0.unwrap();

    let changed = ["train.epochs=2"];
    let (refused, _) =
        run_alone(&mut trainer_with(location, &changed), Generation(2), &Restore::default());
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("train.epochs: 1 → 2"), "{refused}");
    assert!(refused.contains("--allow-recipe-change"), "{refused}");

    let allowed = Restore { allow_recipe_change: true, ..Restore::default() };
    let another =
        |overrides: &[&str]| trainer_of(another_job(), Store::open(location).unwrap(), overrides);
    let (ended, reports) = run_alone(&mut another(&changed), Generation(3), &allowed);
    assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
    let Some(RankReport::Started { source: StateSource::Checkpoint(restored), progress }) =
        reports.iter().find(|report| matches!(report, RankReport::Started { .. }))
    else {
        panic!("{reports:?}")
    };
    assert_eq!(progress.step, Step(4));
    assert_eq!(restored.changes, ["train.epochs: 1 → 2"]);
    assert_eq!((restored.world_size, restored.lr), (1, 0.1));

    let larger = ["train.epochs=2", "model.num_classes=11"];
    let (refused, _) = run_alone(&mut trainer_with(location, &larger), Generation(4), &allowed);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("must keep its shape"), "{refused}");
}

/// The position at which training began.
fn started(reports: &[RankReport]) -> &Progress {
    let found = reports.iter().find_map(|report| match report {
        RankReport::Started { progress, .. } => Some(progress),
        _ => None,
    });
    found.unwrap()
}

/// Steps and numbers of samples of all evaluations.
fn evaluations(reports: &[RankReport]) -> Vec<(Step, u64)> {
    let evaluated = reports.iter().filter_map(|report| match report {
        RankReport::Evaluated { step, accuracy, .. } => Some((*step, accuracy.samples)),
        _ => None,
    });
    evaluated.collect()
}

#[test]
fn only_results_that_can_be_compared_count_after_an_allowed_change() {
    let folder = tempfile::tempdir().unwrap();
    let location = folder.path().to_str().unwrap();
    let store = || Store::open(location).unwrap();
    let keep = "checkpoint.keep_last=99";
    run_alone(&mut trainer_with(location, &[keep]), Generation(1), &Restore::default()).0.unwrap();
    let name = "step-0000000004-gen-000001";
    let saved = store().manifest(name).unwrap().progress;
    assert!(saved.best.is_some() && saved.first_score.is_some(), "{saved:?}");
    assert_ne!(saved.watch, LossWatch::default());

    let resume = |generation: u64, change: &str| {
        let restore = Restore {
            not_before: Generation(generation),
            path: Some(name.to_owned()),
            allow_recipe_change: true,
            ..Restore::default()
        };
        let mut trainer = trainer_of(another_job(), store(), &[keep, "train.epochs=2", change]);
        let (ended, reports) = run_alone(&mut trainer, Generation(generation), &restore);
        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
        reports
    };
    let reports = resume(2, "schedule={ kind='constant', lr=0.2 }");
    // Only its own job tells its evaluations again.
    let known = Progress { newest_evaluations: Vec::new(), ..saved.clone() };
    assert_eq!(*started(&reports), known);
    assert_eq!(evaluations(&reports), [(Step(8), 360)]);

    let reports = resume(3, &format!("data.train='{}'", digits("train")));
    assert_eq!(*started(&reports), Progress { watch: LossWatch::default(), ..known });

    let reports = resume(4, &format!("data.val='{}'", digits("train")));
    let anew = Progress { step: Step(4), epoch: Epoch(1), ..Progress::default() };
    assert_eq!(*started(&reports), anew);
    // Before it trains, the state is evaluated on the other data.
    assert_eq!(evaluations(&reports), [(Step(4), 1437), (Step(8), 1437)]);
    assert_eq!(store().manifest(name).unwrap().progress, saved, "it keeps its own evaluation");
    let own = store().manifest("step-0000000004-gen-000004").unwrap().progress;
    assert_eq!(own.last_evaluation.unwrap().samples, 1437);
}

#[test]
fn an_epoch_that_a_change_made_shorter_than_its_cursor_ends_without_an_empty_update() {
    let folder = tempfile::tempdir().unwrap();
    let location = folder.path().to_str().unwrap();
    let saves = ["checkpoint.every_steps=3", "checkpoint.keep_last=99"];
    run_alone(&mut trainer_with(location, &saves), Generation(1), &Restore::default()).0.unwrap();

    let restore = Restore {
        not_before: Generation(2),
        path: Some("step-0000000003-gen-000001".to_owned()),
        allow_recipe_change: true,
        ..Restore::default()
    };
    // 270 samples of the epoch are used; now it has one batch of 260.
    let larger = ["train.epochs=2", "train.global_batch=260", "checkpoint.keep_last=99"];
    let store = Store::open(location).unwrap();
    let mut trainer = trainer_of(another_job(), store, &larger);
    let (ended, reports) = run_alone(&mut trainer, Generation(2), &restore);
    assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
    let Progress { step, epoch, cursor, .. } = started(&reports);
    assert_eq!((*step, *epoch, *cursor), (Step(3), Epoch(1), 0));
    assert_eq!(evaluations(&reports), [(Step(3), 360), (Step(4), 360)]);
    let steps: Vec<Step> = committed(&reports).iter().map(|commit| commit.step).collect();
    assert_eq!(steps, [Step(3), Step(4)]);
    let manifest = Store::open(location).unwrap().manifest("step-0000000003-gen-000002").unwrap();
    assert_eq!((manifest.progress.epoch, manifest.progress.cursor), (Epoch(1), 0));
    assert_eq!(manifest.progress.evaluated, Some(Epoch(1)));
}

/// Two epochs; in the second the learning rate rises so far that the loss overflows.
const EXPLODING: [&str; 3] = [
    "train.epochs=3",
    "schedule={kind='piecewise_linear', points=[[0.0, 0.1], [1.0, 0.1], [1.01, 1e38], [3.0, 1e38]]}",
    "guard.lr_factor=1e-38",
];

#[test]
fn a_divergence_is_reported_with_its_batch_and_changes_no_state() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = trainer_with(folder.path().to_str().unwrap(), &EXPLODING);
    let (ended, _) = run_alone(&mut trainer, Generation(1), &Restore::default());
    let Err(Error::Diverged(found)) = ended else { panic!("{ended:?}") };
    assert!(found.step > Step(4) && found.batch.epoch == Epoch(1), "{found:?}");
    assert!(found.lr > 1e30 && !found.samples.is_empty(), "{found:?}");
    assert_eq!(trainer.step(), Some(found.step));
    for region in trainer.learner().regions() {
        assert!(region.buffer.to_host().unwrap().iter().all(|value| value.is_finite()));
    }
}

#[test]
fn a_rollback_resumes_from_the_last_good_checkpoint_with_a_lower_rate() {
    let folder = tempfile::tempdir().unwrap();
    let location = folder.path().to_str().unwrap();
    let mut trainer = trainer_with(location, &EXPLODING);
    let (ended, _) = run_alone(&mut trainer, Generation(1), &Restore::default());
    let Err(Error::Diverged(found)) = ended else { panic!("{ended:?}") };

    let rollback =
        Rollback { generation: Generation(2), before: found.step, suspect_from: None, skip: None };
    let restore = Restore { rollbacks: vec![rollback], ..Restore::default() };
    let (ended, reports) = run_alone(&mut trainer, Generation(2), &restore);
    assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
    let started = reports.iter().find_map(|report| match report {
        RankReport::Started { progress, source } => Some((progress, source)),
        _ => None,
    });
    let (progress, source) = started.unwrap();
    // The checkpoint at the end of the first epoch, although the rank had a later state.
    assert_eq!((progress.step, progress.lr_cuts), (Step(4), 1));
    assert!(matches!(source, StateSource::Checkpoint(_)), "{source:?}");
}

#[test]
fn a_batch_named_by_a_rollback_and_the_one_before_are_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let location = folder.path().to_str().unwrap();
    let mut trainer = trainer_with(location, &["train.epochs=2"]);
    let batch = BatchMark { epoch: Epoch(1), cursor: 90 };
    let rollback = Rollback {
        generation: Generation(1),
        before: Step(5),
        suspect_from: None,
        skip: Some(batch),
    };
    let restore = Restore { rollbacks: vec![rollback], ..Restore::default() };
    let (ended, _) = run_alone(&mut trainer, Generation(1), &restore);
    assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
    assert_eq!(trainer.step(), Some(Step(6)));
    assert_eq!(trainer.position.progress.epoch, Epoch(2));
}

#[test]
fn an_end_that_only_skipped_batches_lead_to_is_saved_with_its_evaluation() {
    // The last two batches of the job are skipped; and the last of an epoch with the first of the next.
    for (before, batch, (step, epoch)) in [
        (7, BatchMark { epoch: Epoch(1), cursor: 270 }, (6, Epoch(2))),
        (4, BatchMark { epoch: Epoch(1), cursor: 0 }, (3, Epoch(1))),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let location = folder.path().to_str().unwrap();
        let overrides = ["train.epochs=2", "checkpoint.every_steps=1", "checkpoint.keep_last=99"];
        let mut trainer = trainer_with(location, &overrides);
        run_alone(&mut trainer, Generation(1), &Restore::default()).0.unwrap();

        let (generation, before) = (Generation(2), Step(before));
        let rollback = Rollback { generation, before, suspect_from: None, skip: Some(batch) };
        let restore = Restore { rollbacks: vec![rollback], ..Restore::default() };
        let (ended, reports) = run_alone(&mut trainer, generation, &restore);
        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
        assert_eq!(started(&reports).step, Step(step));
        let name = SaveId { generation, step: Step(step) }.name();
        let progress = Store::open(location).unwrap().manifest(&name).unwrap().progress;
        assert_eq!((progress.epoch, progress.evaluated_fully), (epoch, Some(epoch)));
    }
}

#[test]
fn rollbacks_apply_to_a_checkpoint_of_another_store_whose_generation_is_higher() {
    let [other, own] = [(), ()].map(|()| tempfile::tempdir().unwrap());
    let location = other.path().to_str().unwrap();
    let overrides = ["train.epochs=2", "checkpoint.keep_last=99"];
    let mut trainer = trainer_with(location, &overrides);
    run_alone(&mut trainer, Generation(5), &Restore::default()).0.unwrap();

    let name = "step-0000000004-gen-000005";
    let batch = BatchMark { epoch: Epoch(1), cursor: 180 };
    let rollback = |generation: u64, skip: Option<BatchMark>| Rollback {
        generation: Generation(generation),
        before: Step(5),
        suspect_from: None,
        skip,
    };
    let restore = Restore {
        not_before: Generation(1),
        path: Some(format!("{location}/{name}")),
        rollbacks: vec![rollback(2, None), rollback(3, Some(batch))],
        ..Restore::default()
    };
    let mut trainer = trainer_with(own.path().to_str().unwrap(), &overrides);
    let (ended, reports) = run_alone(&mut trainer, Generation(3), &restore);
    assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
    let progress = started(&reports);
    assert_eq!((progress.step, progress.lr_cuts), (Step(4), 1));
    assert_eq!(progress.skips, [BatchMark { epoch: Epoch(1), cursor: 90 }, batch]);
    assert_eq!(trainer.step(), Some(Step(6)), "two of four batches are skipped");

    // In one store generations are unique: the checkpoint contains the rollbacks up to its own.
    let restore = Restore {
        not_before: Generation(6),
        path: Some(name.to_owned()),
        rollbacks: vec![rollback(5, None), rollback(7, None)],
        ..Restore::default()
    };
    let mut trainer = trainer_with(location, &overrides);
    let (ended, reports) = run_alone(&mut trainer, Generation(7), &restore);
    assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
    assert_eq!(started(&reports).lr_cuts, 1);
}

#[test]
fn a_target_completes_the_job_and_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let location = folder.path().to_str().unwrap();
    let target = ["train.epochs=50", "limits.target_top1=0.5", "evaluation.subset=0.5"];
    let mut trainer = trainer_with(location, &target);
    let (ended, reports) = run_alone(&mut trainer, Generation(1), &Restore::default());
    assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
    let evaluations = reports.iter().filter_map(|report| match report {
        RankReport::Evaluated { extent, accuracy, .. } => Some((*extent, accuracy.samples)),
        _ => None,
    });
    let evaluations: Vec<_> = evaluations.collect();
    assert_eq!(evaluations.first(), Some(&(Extent::Subset, 180)));
    assert_eq!(evaluations.last(), Some(&(Extent::Full, 360)));
    let reasons: Vec<_> = reports
        .iter()
        .filter_map(|report| match report {
            RankReport::EndsEarly { reason } => Some(reason.as_str()),
            _ => None,
        })
        .collect();
    assert!(reasons.len() == 1 && reasons[0].contains("value = 0.5 } is reached"), "{reasons:?}");
    assert!(trainer.position.progress.epoch < Epoch(50));
}

#[test]
fn accumulated_micro_batches_give_nearly_the_same_model() {
    let trained = |overrides: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        let mut trainer = trainer_with(folder.path().to_str().unwrap(), overrides);
        let (ended, _) = run_alone(&mut trainer, Generation(1), &Restore::default());
        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
        trainer.learner().regions()[0].buffer.to_host().unwrap()
    };
    let whole = trained(&[]);
    let parts = trained(&["train.grad_accumulation=3"]);
    assert_ne!(whole, parts);
    for (a, b) in whole.iter().zip(parts) {
        assert!((a - b).abs() < 1e-5, "{a} {b}");
    }
}

#[test]
fn survivors_of_one_step_continue_together_even_if_one_had_evaluated_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let location = folder.path().to_str().unwrap();
    let mut survivors = [trainer(location), trainer(location)];
    for survivor in &mut survivors {
        survivor.validity = StateValidity::Complete;
        survivor.position.progress.step = Step(4);
        survivor.position.progress.epoch = Epoch(1);
    }
    survivors[1].position.progress.evaluated = Some(Epoch(1));
    survivors[1].position.progress.evaluated_fully = Some(Epoch(1));

    for (ended, _) in run_all(&mut survivors, Generation(2), &Restore::default()) {
        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
    }
}

#[test]
fn a_checkpoint_lost_with_its_generation_is_written_in_the_next() {
    let overrides = ["train.epochs=2", "checkpoint.every_epochs=0"];
    let mut survivor = trainer_on(Store::memory().unwrap(), &overrides);
    survivor.validity = StateValidity::Complete;
    survivor.position.progress.step = Step(4);
    survivor.position.progress.epoch = Epoch(1);
    survivor.position.progress.evaluated = Some(Epoch(1));
    survivor.position.progress.evaluated_fully = Some(Epoch(1));
    survivor.position.progress.saved = Some(Step(3));

    let (ended, reports) = run_alone(&mut survivor, Generation(2), &Restore::default());

    assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
    let steps: Vec<Step> = committed(&reports).iter().map(|commit| commit.step).collect();
    assert_eq!(steps, [Step(4), Step(8)]);
}

#[test]
fn a_checkpoint_of_two_ranks_is_restored_by_any_number_and_all_ranks_learn_of_a_damaged_shard() {
    let folder = tempfile::tempdir().unwrap();
    let location = folder.path().to_str().unwrap();
    let new = || trainer_with(location, &["train.epochs=2"]);
    let mut first = [new(), new()];
    run_all(&mut first, Generation(1), &Restore::default());
    let state = |trainer: &mut Trainer<LinearLearner>| {
        let regions = trainer.learner().regions();
        regions.iter().map(|region| region.buffer.to_host().unwrap()).collect::<Vec<_>>()
    };
    let undisturbed = state(&mut first[0]);

    for world_size in [2, 1] {
        let mut restored: Vec<_> = (0..world_size).map(|_| new()).collect();
        for (ended, reports) in run_all(&mut restored, Generation(2), &Restore::default()) {
            assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
            let RankReport::Started { progress, .. } = &reports[0] else { panic!("{reports:?}") };
            assert_eq!(progress.step, Step(8));
        }
        assert!(restored.iter_mut().all(|trainer| state(trainer) == undisturbed));
    }

    let newest = folder.path().join("step-0000000008-gen-000001");
    let share = newest.join("shard-00001-of-00002.safetensors");
    let mut bytes = std::fs::read(&share).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&share, bytes).unwrap();
    let mut restored = [new(), new()];
    for (ended, reports) in run_all(&mut restored, Generation(3), &Restore::default()) {
        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
        let RankReport::Started { source: StateSource::Checkpoint(restored), progress } =
            &reports[0]
        else {
            panic!("{reports:?}")
        };
        assert_eq!(progress.step, Step(4));
        assert!(restored.skipped[0].contains("shard-00001-of-00002"), "{restored:?}");
    }
    assert!(restored.iter_mut().all(|trainer| state(trainer) == undisturbed));
}

fn weights(learner: &mut LinearLearner) -> Vec<Vec<f32>> {
    learner.regions().iter().map(|region| region.buffer.to_host().unwrap()).collect()
}

/// Makes a step of two ranks. The data of rank 1 never arrives, and one of them gets a request.
fn step_without_data(requested: usize, request: fn(&Controls)) -> Vec<Votes> {
    let controls = [Controls::default(), Controls::default()];
    request(&controls[requested]);
    let group = local::group(2, Duration::from_secs(60));
    let step = |rank: u32, mut collective: local::LocalCollective, controls: &Controls| {
        let mut trainer = trainer_on(Store::memory().unwrap(), &[]);
        let block = rank..rank + 1;
        let mut feed = if rank == 0 { trainer.train_feed(&block) } else { BatchFeed::stalled() };
        let next = step_metrics::before(&trainer.job, &trainer.position.progress);
        let before = weights(&mut trainer.learner);
        let mut validity = StateValidity::Complete;
        let made = Stepper::new(block).step(
            &mut StepContext {
                spec: &trainer.job.spec,
                learner: &mut trainer.learner,
                validity: &mut validity,
                feed: &mut feed,
                controls,
                is_writing: &mut || false,
                ahead: false,
                overlap: true,
            },
            &mut collective,
            next,
            &mut |_, _| panic!("the sums of an abandoned step mean nothing"),
        );
        assert_eq!(validity, StateValidity::Complete);
        assert_eq!(weights(&mut trainer.learner), before);
        match made.unwrap() {
            StepEnd::Abandoned(votes) => votes,
            StepEnd::Made(_) => panic!("a step without the data of rank 1 was made"),
        }
    };
    std::thread::scope(|scope| {
        let members = group.into_iter().zip(&controls).zip(0..);
        let threads: Vec<_> = members
            .map(|((collective, controls), rank)| {
                scope.spawn(move || step(rank, collective, controls))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_stop_or_pause_does_not_wait_for_data_and_no_rank_makes_the_step() {
    let stop = step_without_data(1, |controls| controls.request_stop("a notice".to_owned()));
    let abandoned = Votes { abandon: true, writing: true, ..Votes::default() };
    assert_eq!(stop, [Votes { stop: true, ..abandoned }; 2]);
    let pause = step_without_data(1, |controls| controls.set_paused(true));
    assert_eq!(pause, [Votes { pause: true, ..abandoned }; 2]);
}

/// Names a span that it never completes early.
struct LateSpans(LinearLearner);

impl Learner for LateSpans {
    type Leaf = <LinearLearner as Learner>::Leaf;
    type Loss = f64;

    fn new_leaf(&mut self) -> Result<Self::Leaf, learner::Error> {
        self.0.new_leaf()
    }

    fn gradient(
        &mut self,
        batch: &Batch,
        scale: f32,
        leaf: &mut Self::Leaf,
    ) -> Result<f64, learner::Error> {
        self.0.gradient(batch, scale, leaf)
    }

    fn spans(&self) -> &[Range<usize>] {
        self.0.spans()
    }

    fn measure(&mut self, sum: &mut Self::Leaf) -> Result<(), learner::Error> {
        self.0.measure(sum)
    }

    fn update(&mut self, sum: &mut Self::Leaf, update: &Update) -> Result<(), learner::Error> {
        self.0.update(sum, update)
    }

    fn evaluate(
        &mut self,
        batch: &Batch,
        weights: EvaluatedWeights,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<BatchEvaluation>, learner::Error> {
        self.0.evaluate(batch, weights, is_interrupted)
    }

    fn regions(&mut self) -> Vec<Region<'_>> {
        self.0.regions()
    }

    fn tensors(&self) -> Vec<TensorLocation> {
        self.0.tensors()
    }
}

/// The weights after a step of two ranks with two virtual ranks each, and two micro-batches for each of these.
fn after_a_step<L: Learner>(
    build: fn(&JobSpec) -> Result<L, learner::Error>,
    model: &[&str],
    overlap: bool,
) -> Vec<Vec<f32>> {
    let accumulating =
        ["train.virtual_ranks=4", "train.grad_accumulation=2", "train.global_batch=88"];
    let overrides = [&accumulating, model].concat();
    let step = |mut collective: local::LocalCollective| {
        let trainer = trainer_on(Store::memory().unwrap(), &overrides);
        let rank = collective.rank().0;
        let block = 2 * rank..2 * rank + 2;
        let position = &trainer.position.progress;
        let mut feed = trainer.job.inputs.train_feed(position, block.clone());
        let next = step_metrics::before(&trainer.job, position);
        let mut learner = build(&trainer.job.spec).unwrap();
        let made = Stepper::new(block).step(
            &mut StepContext {
                spec: &trainer.job.spec,
                learner: &mut learner,
                validity: &mut { StateValidity::Complete },
                feed: &mut feed,
                controls: &Controls::default(),
                is_writing: &mut || false,
                ahead: false,
                overlap,
            },
            &mut collective,
            next,
            &mut |_, _| Ok(()),
        );
        assert!(matches!(made.unwrap(), StepEnd::Made(_)));
        learner.regions().iter().map(|region| region.buffer.to_host().unwrap()).collect()
    };
    let ranks: Vec<Vec<Vec<f32>>> = std::thread::scope(|scope| {
        let group = local::group(2, Duration::from_secs(60));
        let threads: Vec<_> = group.into_iter().map(|rank| scope.spawn(|| step(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(ranks[0], ranks[1]);
    ranks.into_iter().next().unwrap()
}

#[test]
fn accumulated_gradients_are_the_same_whenever_their_spans_are_complete() {
    let linear = |spec: &JobSpec| LinearLearner::new(spec, &InputType::Image);
    let late = |spec: &JobSpec| LinearLearner::new(spec, &InputType::Image).map(LateSpans);
    let after = after_a_step(linear, &[], false);
    assert!(after[0].iter().any(|weight| *weight != 0.0));
    assert_eq!(after_a_step(linear, &[], true), after);
    assert_eq!(after_a_step(late, &[], true), after);
}

#[test]
fn accumulated_gradients_of_a_network_are_the_same_beside_the_backward_pass() {
    let resnet = |spec: &JobSpec| {
        device::set_threads(1);
        TorchLearner::new(spec, &InputType::Image, Device::Cpu)
    };
    let model = ["model={ arch='resnet18', num_classes=10 }", "train.resolution=32"];
    let frozen = ["model.pretrained=unused.safetensors", "model.freeze=['stem', 'layer1']"];
    for model in [&model[..], &[&model[..], &frozen].concat()] {
        let after = after_a_step(resnet, model, false);
        assert!(after_a_step(resnet, model, true) == after, "{model:?}");
    }
}

#[test]
fn fast_sums_are_possible_on_any_number_of_ranks_in_the_fixed_tree() {
    let fast = ["train.virtual_ranks=8", "train.global_batch=88", "precision.determinism=fast"];
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().to_str().unwrap();
    let mut trainers: Vec<_> = (0..3).map(|_| trainer_with(store, &fast)).collect();
    for (ended, _) in run_all(&mut trainers, Generation(1), &Restore::default()) {
        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
    }
}
