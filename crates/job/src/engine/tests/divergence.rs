//! Training that diverges.

use super::*;
use crate::message::{Restore, Rollback};
use baton_recipe::guard::{BatchMark, Diagnosis, Divergence};

// ---- states ----

/// Two ranks on two nodes train from this step on.
fn training_since(step: u64, overrides: &[&str]) -> Engine {
    let mut engine = Engine::new(&spec_with(overrides), origin(), at(0.0));
    engine.policy.min_ranks = 2;
    for number in [0, 1] {
        attach(&mut engine, at(0.0), number, 1, None);
    }
    train(&mut engine, at(1.0), step);
    engine.policy.min_ranks = 1;
    engine
}

/// Brings the opened generation to training.
fn train(engine: &mut Engine, now: Time, step: u64) {
    all_ready(engine, now, None);
    let progress = Progress { step: Step(step), ..Progress::default() };
    for rank in 0..engine.status().ranks.len() as u32 {
        let source = StateSource::fresh();
        report(engine, now, rank, RankReport::Started { source, progress: progress.clone() });
    }
    assert_eq!(engine.status().phase, PhaseName::Training);
}

// ---- reports ----

pub(super) fn diagnosis(step: u64) -> Diagnosis {
    Diagnosis {
        divergence: Divergence::LossNotFinite,
        step: Step(step),
        batch: BatchMark { epoch: baton_recipe::Epoch(1), cursor: 640 },
        lr: 0.1,
        loss: None,
        gradient_norm: Some(3.5),
        samples: vec![7, 9],
        evaluated: None,
    }
}

fn diverged(step: u64) -> RankReport {
    RankReport::Diverged(diagnosis(step))
}

fn rollback(generation: u64, before: u64) -> Rollback {
    Rollback {
        generation: Generation(generation),
        before: Step(before),
        suspect_from: None,
        skip: None,
    }
}

fn incident(generation: u64, step: u64, rollback: Option<Rollback>) -> Incident {
    Incident { generation: Generation(generation), diagnosis: diagnosis(step), rollback }
}

fn rollbacks(engine: &Engine) -> Vec<Rollback> {
    engine.status().incidents.into_iter().filter_map(|incident| incident.rollback).collect()
}

fn launched_rollbacks(actions: &[Action]) -> Vec<Vec<Rollback>> {
    launches(actions).into_iter().map(|launch| launch.restore.rollbacks).collect()
}

// ---- rolling back ----

#[test]
fn a_divergence_is_persisted_written_and_followed_by_a_generation_that_rolls_back() {
    let mut engine = training_since(30, &[]);

    let actions = report(&mut engine, at(10.0), 1, diverged(40));

    let back = rollback(2, 40);
    let expected = incident(1, 40, Some(back.clone()));
    assert_eq!(actions[0], Action::Persist(Record::Diverged(expected)));
    assert!(
        matches!(&actions[1], Action::WriteDiagnosis(written) if written.name() == "diagnosis-1")
    );
    assert!(opens(&actions[2..], 2));
    assert_eq!(launched_rollbacks(&actions), [vec![back.clone()], vec![back]]);
}

#[test]
fn the_remedy_is_published_with_the_name_of_the_diagnosis_file() {
    let mut engine = training_since(30, &[]);
    let generation = engine.lifecycle.generation;
    let event = rank_event(&engine, generation, 0, diverged(40));

    let actions = engine.drive(at(10.0), event);

    let published = actions.into_iter().find_map(|action| match action {
        Action::Publish(published) if published.kind == JobEventKind::Diverged => Some(published),
        _ => None,
    });
    let published = published.unwrap();
    assert_eq!((published.generation, published.step), (Generation(1), Some(Step(40))));
    assert_eq!(
        published.message,
        "training diverged: the loss is not a finite number at step 40 (epoch 1, sample 640 of \
         it), lr 1.000e-1, gradient norm 3.500e0, samples 7, 9; back to before step 40 with a lower \
         learning rate (rollback 1 of 3); see diagnosis-1.md in the run folder"
    );
}

#[test]
fn later_reports_of_the_same_divergence_change_nothing() {
    let mut engine = training_since(30, &[]);
    detach(&mut engine, at(9.0), 1);
    // Node 1 is disconnected, so the generation stays open.
    report(&mut engine, at(10.0), 0, diverged(40));
    assert_eq!(engine.status().phase, PhaseName::Detecting);

    let phase = RankPhase::Diverged(diagnosis(40));
    let actions = attach(&mut engine, at(11.0), 1, 1, running(1, &[(1, phase)]));

    assert!(opens(&actions, 2));
    assert_eq!(rollbacks(&engine), [rollback(2, 40)]);
}

#[test]
fn a_rollback_waits_for_a_disconnected_node() {
    let mut engine = training_since(30, &[]);
    detach(&mut engine, at(9.0), 1);

    let actions = report(&mut engine, at(10.0), 0, diverged(40));

    assert!(launches(&actions).is_empty());
    assert_eq!(
        engine.status().reason,
        "rolling back: the loss is not a finite number; waiting for node node1, which is disconnected"
    );
    assert!(opens(&tick(&mut engine, at(14.0)), 2));
}

#[test]
fn every_later_launch_carries_all_rollbacks() {
    let mut engine = training_since(30, &[]);
    report(&mut engine, at(10.0), 0, diverged(40));
    train(&mut engine, at(11.0), 30);
    let second = Rollback { suspect_from: Some(Step(20)), ..rollback(3, 35) };
    let both = vec![rollback(2, 40), second];

    let actions = report(&mut engine, at(12.0), 0, diverged(35));
    assert_eq!(launched_rollbacks(&actions), [both.clone(), both.clone()]);

    let actions = report(&mut engine, at(13.0), 1, crashed());
    assert_eq!(launched_rollbacks(&actions), [both.clone(), both]);
}

#[test]
fn the_state_in_which_training_diverged_is_invalid_and_the_window_in_which_the_loss_rose_a_last_resort()
 {
    let rose = Divergence::LossRose { mean: 4.0, bound: 3.0 };
    for (divergence, remedy, suspect) in [
        (Divergence::LossNotFinite, "lower_lr", None),
        (Divergence::GradientNotFinite, "lower_lr", None),
        (rose, "lower_lr", Some(33)),
        // The state before both batches that are skipped is not damaged by them.
        (rose, "skip_batch", None),
    ] {
        let remedy = format!("guard.remedy={remedy}");
        let mut engine = training_since(30, &[&remedy, "guard.window=8"]);
        let found = Diagnosis { divergence, ..diagnosis(40) };
        report(&mut engine, at(10.0), 0, RankReport::Diverged(found));

        let found = &rollbacks(&engine)[0];
        assert_eq!((found.before, found.suspect_from), (Step(40), suspect.map(Step)));
    }
}

#[test]
fn while_fp16_overflows_all_states_have_the_same_weights() {
    let mut engine = training_since(30, &["precision.compute=fp16"]);
    let found = Diagnosis { divergence: Divergence::GradientNotFinite, ..diagnosis(40) };
    report(&mut engine, at(10.0), 0, RankReport::Diverged(found));
    assert_eq!(rollbacks(&engine)[0].suspect_from, Some(Step(16)));
}

#[test]
fn a_checkpoint_of_the_window_is_named_only_if_there_is_no_other() {
    let rose = Divergence::LossRose { mean: 4.0, bound: 3.0 };
    for (saved, named) in [(&[20, 35, 40][..], Some(20)), (&[35, 40], Some(35)), (&[40], None)] {
        let mut engine = training_since(10, &["guard.window=8"]);
        for step in saved {
            report(&mut engine, at(9.0), 0, RankReport::Saved(commit(1, *step)));
        }
        let found = Diagnosis { divergence: rose, ..diagnosis(40) };
        report(&mut engine, at(10.0), 0, RankReport::Diverged(found));
        let status = engine.status();
        assert_eq!(status.commit.map(|commit| commit.step), named.map(Step), "{saved:?}");
        let newest = saved.iter().rev().find(|step| **step < 40);
        let last_saved = engine.restore().last_saved.map(|(_, step)| step);
        assert_eq!(last_saved, newest.copied().map(Step), "{saved:?}");
    }
}

#[test]
fn a_collapse_makes_all_states_since_the_evaluation_before_it_a_last_resort() {
    let divergence = Divergence::AccuracyCollapsed { score: 0.1, best: 0.9 };
    // The second one makes one more window of eight steps a last resort.
    for (evaluated, suspect, again) in
        [(Some(20), Some(21), 13), (Some(40), None, 32), (None, None, 32)]
    {
        let mut engine = training_since(30, &["guard.max_rollbacks=1", "guard.window=8"]);
        let found = Diagnosis { divergence, evaluated: evaluated.map(Step), ..diagnosis(40) };
        report(&mut engine, at(10.0), 0, RankReport::Diverged(found.clone()));
        let expected = |generation, suspect: Option<u64>| Rollback {
            suspect_from: suspect.map(Step),
            ..rollback(generation, 40)
        };
        assert_eq!(rollbacks(&engine), [expected(2, suspect)], "{evaluated:?}");

        // The second one ends the job.
        train(&mut engine, at(11.0), 30);
        report(&mut engine, at(12.0), 0, RankReport::Diverged(found));
        assert_eq!(failure_of(&engine).class, Class::Diverged);
        assert_eq!(engine.restore().invalidated, [expected(3, Some(again))], "{evaluated:?}");
    }
}

#[test]
fn if_training_diverges_again_soon_the_state_that_the_last_rollback_used_is_a_last_resort_too() {
    let rose = Divergence::LossRose { mean: 4.0, bound: 3.0 };
    let nan = Divergence::LossNotFinite;
    // The first one makes all from 33 on suspect where the loss rose, and nothing where it is not finite.
    for (first, again, step, suspect, next) in [
        (rose, rose, 38, Some(25), Some(17)),
        (rose, rose, 48, Some(25), Some(17)),
        (rose, rose, 49, Some(42), Some(34)),
        (rose, nan, 38, Some(25), Some(17)),
        (nan, nan, 40, Some(32), Some(24)),
        (nan, nan, 48, Some(32), Some(24)),
        (nan, nan, 49, None, Some(41)),
    ] {
        let mut engine = training_since(20, &["guard.window=8", "guard.max_rollbacks=2"]);
        let found =
            |divergence, step| RankReport::Diverged(Diagnosis { divergence, ..diagnosis(step) });
        report(&mut engine, at(10.0), 0, found(first, 40));
        train(&mut engine, at(11.0), 30);
        report(&mut engine, at(12.0), 0, found(again, step));
        let last = &rollbacks(&engine)[1];
        assert_eq!((last.before, last.suspect_from), (Step(step), suspect.map(Step)));

        // The next one ends the job, and the next start goes back one window further.
        train(&mut engine, at(13.0), 16);
        report(&mut engine, at(14.0), 0, found(again, step));
        let ended = engine.restore().invalidated[0].suspect_from;
        assert_eq!(ended, next.map(Step), "{first:?} {again:?} {step}");
    }
}

#[test]
fn batches_that_are_skipped_do_not_make_older_states_suspect() {
    let mut engine = training_since(30, &["guard.remedy=skip_batch", "guard.window=8"]);
    report(&mut engine, at(10.0), 0, diverged(40));
    train(&mut engine, at(11.0), 30);
    report(&mut engine, at(12.0), 0, diverged(41));
    assert!(rollbacks(&engine).iter().all(|rollback| rollback.suspect_from.is_none()));
}

#[test]
fn the_batch_is_skipped_if_the_recipe_sets_that_remedy() {
    let mut engine = training_since(30, &["guard.remedy=skip_batch"]);
    report(&mut engine, at(10.0), 0, diverged(40));

    assert_eq!(rollbacks(&engine)[0].skip, Some(diagnosis(40).batch));
}

#[test]
fn a_collapse_has_no_batch_to_skip_and_invalidates_the_checkpoint_of_the_evaluated_state() {
    let mut engine = training_since(30, &["guard.remedy=skip_batch"]);
    let divergence = Divergence::AccuracyCollapsed { score: 0.1, best: 0.9 };
    report(
        &mut engine,
        at(10.0),
        0,
        RankReport::Diverged(Diagnosis { divergence, ..diagnosis(40) }),
    );

    assert_eq!(rollbacks(&engine), [rollback(2, 40)]);
    assert!(engine.restore().invalidated_by(Generation(1), Step(40)).is_some());
    assert!(engine.restore().invalidated_by(Generation(1), Step(39)).is_none());
}

#[test]
fn a_collapse_that_ends_the_job_invalidates_its_checkpoint_for_the_next_start() {
    let divergence = Divergence::AccuracyCollapsed { score: 0.1, best: 0.9 };
    let mut last = incident(4, 40, None);
    last.diagnosis.divergence = divergence;
    let failure = Failure { class: Class::Diverged, message: "diverged".to_owned() };
    let ended = Record::Ended(Outcome::Failed { failure });
    let [valid, collapsed] = [33, 40].map(|step| Record::Saved(commit(4, step)));
    let begun = opened(4, vec![placement(0, 0, 0)]);
    let engine = replayed(&[begun, valid, collapsed, Record::Diverged(last), ended]);

    assert!(engine.restore().invalidated_by(Generation(4), Step(40)).is_some());
    assert!(engine.restore().invalidated_by(Generation(4), Step(39)).is_none());
    assert!(engine.restore().invalidated_by(Generation(5), Step(40)).is_none());
    assert_eq!(engine.status().invalidated, [rollback(5, 40)]);
    assert_eq!(engine.status().commit.unwrap().step, Step(33));
}

#[test]
fn a_job_with_another_recipe_does_not_resume_from_what_the_one_before_rolled_back() {
    let mut before = training_since(30, &[]);
    report(&mut before, at(10.0), 0, diverged(40));
    let restore = Restore { allow_recipe_change: true, ..before.restore() };
    let spec = spec_with(&[]);
    let engine = Engine::continuing(&before, &spec, JobOrigin { restore, ..origin() }, at(11.0));

    let Restore { rollbacks, invalidated, .. } = engine.restore();
    // Nor does it change the learning rate of the new recipe.
    assert_eq!((rollbacks, invalidated), (Vec::new(), vec![rollback(2, 40)]));
}

#[test]
fn a_rollback_does_not_count_as_a_failed_generation() {
    let mut engine = training_since(30, &["guard.max_rollbacks=9", "cluster.restart_limit=0"]);
    for round in 0..9 {
        report(&mut engine, at(10.0), 0, diverged(40 - round));
        train(&mut engine, at(11.0), 30);
    }

    assert_eq!(rollbacks(&engine).len(), 9);
    assert_eq!(causes(&engine), [""; 0]);
}

#[test]
fn a_death_reported_after_the_divergence_does_not_make_it_a_failure() {
    let mut engine = training_since(30, &["cluster.restart_limit=0"]);
    detach(&mut engine, at(9.0), 1);
    report(&mut engine, at(10.0), 0, diverged(40));
    report(&mut engine, at(10.1), 0, crashed());

    let back = attach(&mut engine, at(11.0), 1, 1, running(1, &[(1, RankPhase::Waiting)]));

    assert!(opens(&back, 2), "{:?}", engine.outcome());
}

#[test]
fn steps_made_again_after_a_rollback_are_progress() {
    let mut engine = training_since(0, &["cluster.restart_limit=1"]);
    report(&mut engine, at(9.0), 0, stepped(40));
    report(&mut engine, at(10.0), 0, diverged(40));
    train(&mut engine, at(11.0), 30);
    for (now, step) in [(12.0, 31), (14.0, 32), (16.0, 33)] {
        report(&mut engine, at(now), 0, stepped(step));
        report(&mut engine, at(now), 1, crashed());
        train(&mut engine, at(now), 30);
    }

    assert_eq!(engine.outcome(), None);
}

#[test]
fn readers_see_the_step_go_back_with_its_reason() {
    let mut engine = training_since(0, &[]);
    report(&mut engine, at(9.0), 0, stepped(40));
    report(&mut engine, at(10.0), 0, diverged(40));
    train(&mut engine, at(11.0), 30);
    report(&mut engine, at(12.0), 0, stepped(31));

    let status = engine.status();
    assert_eq!(status.latest.unwrap().step, Step(31));
    assert_eq!(status.incidents, [incident(1, 40, Some(rollback(2, 40)))]);
    assert_eq!(status.incidents[0].remedy(), "back to before step 40 with a lower learning rate");
}

#[test]
fn evaluations_that_were_rolled_back_are_discarded() {
    let mut engine = training_since(0, &[]);
    let found = |step, top1| RankReport::Evaluated {
        step: Step(step),
        epoch: baton_recipe::Epoch(1),
        accuracy: Accuracy::new(8, [("top1", top1)]),
        ema: None,
        extent: baton_recipe::progress::Extent::Full,
        texts: Vec::new(),
    };
    report(&mut engine, at(8.0), 0, found(20, 0.9));
    report(&mut engine, at(9.0), 0, found(40, 0.1));
    let divergence = Divergence::AccuracyCollapsed { score: 0.1, best: 0.9 };
    // The state with which the generation began is invalid.
    let rank_report = RankReport::Diverged(Diagnosis { divergence, ..diagnosis(39) });
    report(&mut engine, at(10.0), 0, rank_report);

    let status = engine.status();
    assert_eq!(status.evaluation, None);
    assert_eq!(status.best.map(|(step, _)| step), Some(Step(20)));
}

// ---- end of the job ----

#[test]
fn when_the_attempts_are_used_up_the_job_fails_for_good_with_advice() {
    let mut engine = training_since(30, &["guard.max_rollbacks=1"]);
    report(&mut engine, at(10.0), 0, diverged(40));
    train(&mut engine, at(11.0), 30);

    let actions = report(&mut engine, at(12.0), 0, diverged(42));

    assert_eq!(actions[0], Action::Persist(Record::Diverged(incident(2, 42, None))));
    let failure = failure_of(&engine);
    assert_eq!(failure.class, Class::Diverged);
    assert_eq!(
        failure.message,
        "training diverged, after 1 rollbacks (guard.max_rollbacks = 1): the loss is not a finite \
         number at step 42 (epoch 1, sample 640 of it), lr 1.000e-1, gradient norm 3.500e0, samples \
         7, 9; try: inspect the samples named above with `baton data inspect train.beton`; if they \
         are bad, set guard.remedy = \"skip_batch\"; set train.clip_grad_norm = 1.0; lengthen the \
         warm-up, or lower the learning rate in schedule"
    );
    assert_eq!(engine.outcome().unwrap().exit_code(), crate::exit::BAD_INPUT);
}

#[test]
fn without_the_guard_the_first_divergence_ends_the_job() {
    let mut engine = training_since(30, &["guard.enabled=false"]);

    report(&mut engine, at(10.0), 0, diverged(40));

    assert!(failure_of(&engine).message.contains("guard.enabled = false"));
}

#[test]
fn each_diagnosis_is_written_under_a_different_number() {
    let mut engine = training_since(30, &["guard.max_rollbacks=1"]);
    let mut names = Vec::new();
    for step in [40, 42] {
        let actions = report(&mut engine, at(10.0), 0, diverged(step));
        names.extend(actions.into_iter().filter_map(|action| match action {
            Action::WriteDiagnosis(written) => Some((written.name(), written.remedy)),
            _ => None,
        }));
        if engine.outcome().is_none() {
            train(&mut engine, at(11.0), 30);
        }
    }
    let back = "back to before step 40 with a lower learning rate".to_owned();
    let ended = "the job ended".to_owned();
    assert_eq!(names, [("diagnosis-1".to_owned(), back), ("diagnosis-2".to_owned(), ended)]);
}

// ---- diagnosis files ----

fn written(rank_report: RankReport) -> WrittenDiagnosis {
    let mut engine = training_since(30, &[]);
    let latest = StepReport {
        step: Step(39),
        loss: 2.5,
        lr: 0.1,
        gradient_norm: Some(f64::NAN),
        ..StepReport::default()
    };
    report(&mut engine, at(9.0), 0, RankReport::Stepped(latest));
    let actions = report(&mut engine, at(10.0), 0, rank_report);
    let written = |action| match action {
        Action::WriteDiagnosis(written) => Some(*written),
        _ => None,
    };
    actions.into_iter().find_map(written).unwrap()
}

#[test]
fn the_markdown_file_has_what_happened_what_was_done_and_what_to_try() {
    let expected = "\
# Diagnosis 1 of demo

Training diverged: the loss is not a finite number.

What was done: back to before step 40 with a lower learning rate.

| | |
|---|---|
| job | 00000000-0000-0000-0000-000000000000 |
| generation | 1 |
| steps made before | 40 |
| batch | epoch 1, from sample 640 of its order |
| learning rate | 1.0000e-1 |
| loss of the batch | no finite number |
| gradient norm | 3.5000e0 |
| samples | 7, 9 |
| last step reported | step 39, loss 2.5000, learning rate 1.0000e-1, gradient norm no finite number |

Try these, most likely first:

1. inspect the samples named above with `baton data inspect train.beton`; if they are bad, set guard.remedy = \"skip_batch\"
2. set train.clip_grad_norm = 1.0
3. lengthen the warm-up, or lower the learning rate in schedule
";
    assert_eq!(written(diverged(40)).to_markdown(), expected);
}

#[test]
fn the_json_file_has_null_for_numbers_that_are_not_finite() {
    let json: serde_json::Value = serde_json::from_str(&written(diverged(40)).to_json()).unwrap();
    assert_eq!(json["diagnosis"]["step"], 40);
    assert_eq!(json["diagnosis"]["samples"], serde_json::json!([7, 9]));
    assert_eq!(json["rollback"]["before"], 40);
    assert_eq!(json["latest"]["gradient_norm"], serde_json::Value::Null);
    assert_eq!(json["advice"].as_array().unwrap().len(), 3);
}

// ---- drains ----

#[test]
fn a_drain_ends_the_job_if_no_rank_holds_a_valid_state() {
    let mut engine = training_since(30, &[]);
    drain(&mut engine, at(10.0));
    report(&mut engine, at(10.1), 0, diverged(40));

    all_ready(&mut engine, at(11.0), None);

    assert_eq!(engine.outcome(), Some(&drained()));
    assert_eq!(
        rollbacks(&engine),
        [rollback(2, 40)],
        "the rollback is recorded for the next start"
    );
}

#[test]
fn a_drain_saves_a_valid_state_that_ranks_still_hold() {
    let mut engine = training_since(30, &[]);
    drain(&mut engine, at(10.0));
    report(&mut engine, at(10.1), 0, diverged(40));
    all_ready(&mut engine, at(11.0), Some(40));
    assert_eq!(engine.status().phase, PhaseName::Meeting);

    all_started(&mut engine, at(12.0));

    assert_eq!(engine.status().phase, PhaseName::Draining);
}

// ---- after a restart of the coordinator ----

fn replayed(records: &[Record]) -> Engine {
    let placements = vec![placement(0, 0, 0), placement(1, 1, 0)];
    let mut journal = vec![opened(1, placements)];
    journal.extend_from_slice(records);
    replay(&journal)
}

#[test]
fn rollbacks_survive_the_coordinator() {
    let back = rollback(1, 40);
    let mut engine = replayed(&[Record::Diverged(incident(1, 40, Some(back.clone())))]);
    for number in [0, 1] {
        let held = running(1, &[(number, RankPhase::Training)]);
        attach(&mut engine, at(1.0), number, 1, held);
    }

    assert_eq!(
        engine.status().phase,
        PhaseName::Training,
        "generation 1 is the one that carries out the rollback"
    );
    let actions = report(&mut engine, at(10.0), 1, crashed());
    assert_eq!(launched_rollbacks(&actions), [vec![back.clone()], vec![back]]);
}

#[test]
fn a_rollback_that_was_persisted_is_carried_out_by_the_next_coordinator() {
    let back = rollback(2, 40);
    let mut engine = replayed(&[Record::Diverged(incident(1, 40, Some(back.clone())))]);
    // The report of this rank's divergence has not reached its agent yet.
    attach(&mut engine, at(1.0), 0, 1, running(1, &[(0, RankPhase::Training)]));

    let held = running(1, &[(1, RankPhase::Training)]);
    let actions = attach(&mut engine, at(1.0), 1, 1, held);

    assert_eq!(launched_rollbacks(&actions), [vec![back.clone()], vec![back.clone()]]);
    assert_eq!(rollbacks(&engine), [back]);
}

#[test]
fn ranks_that_diverged_without_the_coordinator_are_rolled_back_once_all_have_reported() {
    let mut engine = replayed(&[]);
    let phase = |_| RankPhase::Diverged(diagnosis(40));
    let first = attach(&mut engine, at(1.0), 0, 1, running(1, &[(0, phase(0))]));
    assert!(launches(&first).is_empty(), "node 1 may still reattach");
    assert_eq!(rollbacks(&engine), [rollback(2, 40)]);

    let actions = attach(&mut engine, at(2.0), 1, 1, running(1, &[(1, phase(1))]));

    assert!(opens(&actions, 2));
    assert_eq!(engine.status().incidents.len(), 1);
}

#[test]
fn a_job_that_diverged_for_good_does_so_again_at_the_next_divergence() {
    let mut records: Vec<Record> = (2..5)
        .map(|generation| Record::Diverged(incident(1, 40, Some(rollback(generation, 41)))))
        .collect();
    let failure = Failure { class: Class::Diverged, message: "diverged".to_owned() };
    records.push(opened(4, vec![placement(0, 0, 0)]));
    records.push(Record::Diverged(incident(4, 40, None)));
    records.push(Record::Ended(Outcome::Failed { failure }));
    let mut engine = replayed(&records);
    attach(&mut engine, at(1.0), 0, 1, None);
    train(&mut engine, at(2.0), 30);

    report(&mut engine, at(3.0), 0, diverged(40));

    assert_eq!(failure_of(&engine).class, Class::Diverged);
}

// ---- the rule for rollbacks ----

#[test]
fn a_rollback_invalidates_older_generations_from_its_step_on() {
    let restore = Restore { rollbacks: vec![rollback(3, 41)], ..Restore::default() };
    let invalidated =
        |generation, step| restore.invalidated_by(Generation(generation), Step(step)).is_some();
    assert!(invalidated(2, 41) && invalidated(1, 90));
    assert!(!invalidated(2, 40) && !invalidated(3, 41));
}

#[test]
fn a_divergence_before_the_restart_of_the_coordinator_is_rolled_back_without_the_absent_nodes() {
    let engine = training_since(0, &[]);
    let placements = engine.lifecycle.world().unwrap().placements().to_vec();
    let mut restarted = replay(&[opened(1, placements), Record::Saved(commit(1, 20))]);
    let diverged = running(1, &[(0, RankPhase::Diverged(diagnosis(40)))]);

    assert!(opens(&attach(&mut restarted, at(6.0), 0, 1, diverged), 2));
}
