//! Training that goes wrong.

use super::*;
use crate::message::{Restore, Rollback};
use baton_recipe::guard::{BatchMark, Diagnosis, Divergence};

// ---- states ----

/// Two ranks on two nodes train since this step.
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

/// The generation that was opened comes to train.
fn train(engine: &mut Engine, now: Time, step: u64) {
    all_ready(engine, now, None);
    let progress = Progress { step: Step(step), ..Progress::default() };
    for rank in 0..engine.status().ranks.len() as u32 {
        let source = StateSource::Fresh;
        say(engine, now, rank, RankNews::Started { source, progress: progress.clone() });
    }
    assert_eq!(engine.status().phase, PhaseName::Training);
}

// ---- news ----

fn diagnosis(step: u64) -> Diagnosis {
    Diagnosis {
        divergence: Divergence::LossNotFinite,
        step: Step(step),
        batch: BatchMark { epoch: baton_recipe::Epoch(1), cursor: 640 },
        lr: 0.1,
        loss: None,
        gradient_norm: Some(3.5),
        samples: vec![7, 9],
    }
}

fn diverged(step: u64) -> RankNews {
    RankNews::Diverged(diagnosis(step))
}

fn rollback(generation: u64, before: u64) -> Rollback {
    Rollback { generation: Generation(generation), before: Step(before), skip: None }
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

// ---- going back ----

#[test]
fn divergence_is_persisted_written_and_answered_with_a_generation_that_goes_back() {
    let mut engine = training_since(30, &[]);

    let actions = say(&mut engine, at(10.0), 1, diverged(40));

    let back = rollback(2, 41);
    let expected = incident(1, 40, Some(back.clone()));
    assert_eq!(actions[0], Action::Persist(Record::Diverged(expected)));
    assert!(matches!(&actions[1], Action::Write(written) if written.name() == "diagnosis-1"));
    assert!(opens(&actions[2..], 2));
    assert_eq!(launched_rollbacks(&actions), [vec![back.clone()], vec![back]]);
}

#[test]
fn what_follows_is_announced_with_the_name_of_the_written_diagnosis() {
    let mut engine = training_since(30, &[]);
    let generation = engine.lifecycle.generation;
    let event = report(&engine, generation, 0, diverged(40));

    let actions = engine.handle(at(10.0), event);

    let notice = actions.into_iter().find_map(|action| match action {
        Action::Announce(notice) if notice.kind == NoticeKind::Diverged => Some(notice),
        _ => None,
    });
    let notice = notice.unwrap();
    assert_eq!((notice.generation, notice.step), (Generation(1), Some(Step(40))));
    assert_eq!(
        notice.message,
        "training went wrong: the loss is not a finite number at step 40 (epoch 1, sample 640 of \
         it), lr 1.000e-1, gradient norm 3.500e0, samples 7, 9; back to before step 41 with a lower \
         learning rate (rollback 1 of 3); see diagnosis-1.md in the run folder"
    );
}

#[test]
fn later_words_of_the_same_divergence_change_nothing() {
    let mut engine = training_since(30, &[]);
    detach(&mut engine, at(9.0), 1);
    // Node 1, which is away, keeps the generation open.
    say(&mut engine, at(10.0), 0, diverged(40));
    assert_eq!(engine.status().phase, PhaseName::Settling);

    let phase = RankPhase::Diverged(diagnosis(40));
    let actions = attach(&mut engine, at(11.0), 1, 1, holding(1, &[(1, phase)]));

    assert!(opens(&actions, 2));
    assert_eq!(rollbacks(&engine), [rollback(2, 41)]);
}

#[test]
fn a_node_that_is_away_is_waited_for_before_going_back() {
    let mut engine = training_since(30, &[]);
    detach(&mut engine, at(9.0), 1);

    let actions = say(&mut engine, at(10.0), 0, diverged(40));

    assert!(launches(&actions).is_empty());
    assert_eq!(
        engine.status().reason,
        "rolling back: the loss is not a finite number; waiting for node node1, which is away"
    );
    assert!(opens(&tick(&mut engine, at(14.0)), 2));
}

#[test]
fn every_later_launch_carries_all_rollbacks() {
    let mut engine = training_since(30, &[]);
    say(&mut engine, at(10.0), 0, diverged(40));
    train(&mut engine, at(11.0), 30);
    let both = vec![rollback(2, 41), rollback(3, 36)];

    let actions = say(&mut engine, at(12.0), 0, diverged(35));
    assert_eq!(launched_rollbacks(&actions), [both.clone(), both.clone()]);

    let actions = say(&mut engine, at(13.0), 1, crashed());
    assert_eq!(launched_rollbacks(&actions), [both.clone(), both]);
}

#[test]
fn where_no_step_could_be_made_the_state_that_was_begun_with_is_no_good() {
    let mut engine = training_since(30, &[]);
    say(&mut engine, at(10.0), 0, diverged(40));
    train(&mut engine, at(11.0), 40);

    say(&mut engine, at(12.0), 0, diverged(40));

    assert_eq!(rollbacks(&engine), [rollback(2, 41), rollback(3, 40)]);
}

#[test]
fn the_batch_is_left_out_if_the_recipe_wants_that() {
    let mut engine = training_since(30, &["guard.remedy=skip_batch"]);
    say(&mut engine, at(10.0), 0, diverged(40));

    assert_eq!(rollbacks(&engine)[0].skip, Some(diagnosis(40).batch));
}

#[test]
fn a_collapse_has_no_batch_to_leave_out() {
    let mut engine = training_since(30, &["guard.remedy=skip_batch"]);
    let divergence = Divergence::AccuracyCollapsed { score: 0.1, best: 0.9 };
    say(&mut engine, at(10.0), 0, RankNews::Diverged(Diagnosis { divergence, ..diagnosis(40) }));

    assert_eq!(rollbacks(&engine)[0].skip, None);
}

#[test]
fn a_rollback_is_no_failed_generation() {
    let mut engine = training_since(30, &["guard.max_rollbacks=9", "cluster.restart_limit=0"]);
    for round in 0..9 {
        say(&mut engine, at(10.0), 0, diverged(40 - round));
        train(&mut engine, at(11.0), 30);
    }

    assert_eq!(rollbacks(&engine).len(), 9);
    assert_eq!(causes(&engine), [""; 0]);
}

#[test]
fn a_death_told_after_the_divergence_does_not_make_it_a_failure() {
    let mut engine = training_since(30, &["cluster.restart_limit=0"]);
    detach(&mut engine, at(9.0), 1);
    say(&mut engine, at(10.0), 0, diverged(40));
    say(&mut engine, at(10.1), 0, crashed());

    let back = attach(&mut engine, at(11.0), 1, 1, holding(1, &[(1, RankPhase::Waiting)]));

    assert!(opens(&back, 2), "{:?}", engine.outcome());
}

#[test]
fn steps_made_again_after_a_rollback_are_progress() {
    let mut engine = training_since(0, &["cluster.restart_limit=1"]);
    say(&mut engine, at(9.0), 0, stepped(40));
    say(&mut engine, at(10.0), 0, diverged(40));
    train(&mut engine, at(11.0), 30);
    for (now, step) in [(12.0, 31), (14.0, 32), (16.0, 33)] {
        say(&mut engine, at(now), 0, stepped(step));
        say(&mut engine, at(now), 1, crashed());
        train(&mut engine, at(now), 30);
    }

    assert_eq!(engine.outcome(), None);
}

#[test]
fn readers_see_the_step_go_back_with_its_reason() {
    let mut engine = training_since(0, &[]);
    say(&mut engine, at(9.0), 0, stepped(40));
    say(&mut engine, at(10.0), 0, diverged(40));
    train(&mut engine, at(11.0), 30);
    say(&mut engine, at(12.0), 0, stepped(31));

    let status = engine.status();
    assert_eq!(status.latest.unwrap().step, Step(31));
    assert_eq!(status.incidents, [incident(1, 40, Some(rollback(2, 41)))]);
    assert_eq!(status.incidents[0].remedy(), "back to before step 41 with a lower learning rate");
}

#[test]
fn evaluations_that_were_rolled_back_count_no_more() {
    let mut engine = training_since(0, &[]);
    let found = |step, top1| RankNews::Evaluated {
        step: Step(step),
        epoch: baton_recipe::Epoch(1),
        accuracy: Accuracy::new(8, [("top1", top1)]),
        ema: None,
        extent: baton_recipe::progress::Extent::Full,
    };
    say(&mut engine, at(8.0), 0, found(20, 0.9));
    say(&mut engine, at(9.0), 0, found(40, 0.1));
    let divergence = Divergence::AccuracyCollapsed { score: 0.1, best: 0.9 };
    // The state at which the generation began is no good.
    let news = RankNews::Diverged(Diagnosis { divergence, ..diagnosis(39) });
    say(&mut engine, at(10.0), 0, news);

    let status = engine.status();
    assert_eq!(status.evaluation, None);
    assert_eq!(status.best.map(|(step, _)| step), Some(Step(20)));
}

// ---- the end ----

#[test]
fn when_the_attempts_are_used_up_the_job_fails_for_good_with_advice() {
    let mut engine = training_since(30, &["guard.max_rollbacks=1"]);
    say(&mut engine, at(10.0), 0, diverged(40));
    train(&mut engine, at(11.0), 30);

    let actions = say(&mut engine, at(12.0), 0, diverged(42));

    assert_eq!(actions[0], Action::Persist(Record::Diverged(incident(2, 42, None))));
    let failure = failure_of(&engine);
    assert_eq!(failure.class, Class::Diverged);
    assert_eq!(
        failure.message,
        "training diverged, after 1 rollbacks (guard.max_rollbacks = 1): the loss is not a finite \
         number at step 42 (epoch 1, sample 640 of it), lr 1.000e-1, gradient norm 3.500e0, samples \
         7, 9; try: look at the samples named above with `baton data inspect train.beton`; if they \
         are bad, set guard.remedy = \"skip_batch\"; set train.clip_grad_norm = 1.0; lengthen the \
         warm-up, or lower the learning rate in schedule"
    );
    assert_eq!(engine.outcome().unwrap().exit_code(), crate::exit::BAD_INPUT);
}

#[test]
fn without_the_guard_the_first_divergence_ends_the_job() {
    let mut engine = training_since(30, &["guard.enabled=false"]);

    say(&mut engine, at(10.0), 0, diverged(40));

    assert!(failure_of(&engine).message.contains("guard.enabled = false"));
}

#[test]
fn both_diagnoses_are_written_under_numbers_of_their_own() {
    let mut engine = training_since(30, &["guard.max_rollbacks=1"]);
    let mut names = Vec::new();
    for step in [40, 42] {
        let actions = say(&mut engine, at(10.0), 0, diverged(step));
        names.extend(actions.into_iter().filter_map(|action| match action {
            Action::Write(written) => Some((written.name(), written.remedy)),
            _ => None,
        }));
        if engine.outcome().is_none() {
            train(&mut engine, at(11.0), 30);
        }
    }
    let back = "back to before step 41 with a lower learning rate".to_owned();
    let ended = "the job ended".to_owned();
    assert_eq!(names, [("diagnosis-1".to_owned(), back), ("diagnosis-2".to_owned(), ended)]);
}

// ---- what is written ----

fn written(news: RankNews) -> WrittenDiagnosis {
    let mut engine = training_since(30, &[]);
    let latest = StepNews {
        step: Step(39),
        loss: 2.5,
        lr: 0.1,
        gradient_norm: Some(f64::NAN),
        ..StepNews::default()
    };
    say(&mut engine, at(9.0), 0, RankNews::Stepped(latest));
    let actions = say(&mut engine, at(10.0), 0, news);
    let written = |action| match action {
        Action::Write(written) => Some(*written),
        _ => None,
    };
    actions.into_iter().find_map(written).unwrap()
}

#[test]
fn a_person_reads_what_happened_what_was_done_and_what_to_try() {
    let expected = "\
# Diagnosis 1 of demo

Training went wrong: the loss is not a finite number.

What was done: back to before step 41 with a lower learning rate.

| | |
|---|---|
| job | 00000000-0000-0000-0000-000000000000 |
| generation | 1 |
| updates made before | 40 |
| batch | epoch 1, from sample 640 of its order |
| learning rate | 1.0000e-1 |
| loss of the batch | no finite number |
| gradient norm | 3.5000e0 |
| samples | 7, 9 |
| last update told | step 39, loss 2.5000, learning rate 1.0000e-1, gradient norm no finite number |

Try, the likeliest first:

1. look at the samples named above with `baton data inspect train.beton`; if they are bad, set guard.remedy = \"skip_batch\"
2. set train.clip_grad_norm = 1.0
3. lengthen the warm-up, or lower the learning rate in schedule
";
    assert_eq!(written(diverged(40)).to_markdown(), expected);
}

#[test]
fn a_program_reads_the_same_in_json_whatever_is_not_finite() {
    let json: serde_json::Value = serde_json::from_str(&written(diverged(40)).to_json()).unwrap();
    assert_eq!(json["diagnosis"]["step"], 40);
    assert_eq!(json["diagnosis"]["samples"], serde_json::json!([7, 9]));
    assert_eq!(json["rollback"]["before"], 41);
    assert_eq!(json["latest"]["gradient_norm"], serde_json::Value::Null);
    assert_eq!(json["advice"].as_array().unwrap().len(), 3);
}

// ---- drains ----

#[test]
fn a_drain_ends_the_job_once_no_rank_turns_out_to_hold_a_good_state() {
    let mut engine = training_since(30, &[]);
    drain(&mut engine, at(10.0));
    say(&mut engine, at(10.1), 0, diverged(40));

    all_ready(&mut engine, at(11.0), None);

    assert_eq!(engine.outcome(), Some(&drained()));
    assert_eq!(rollbacks(&engine), [rollback(2, 41)], "the next start knows of it");
}

#[test]
fn a_drain_saves_the_good_state_that_ranks_still_hold() {
    let mut engine = training_since(30, &[]);
    drain(&mut engine, at(10.0));
    say(&mut engine, at(10.1), 0, diverged(40));
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
    let back = rollback(1, 41);
    let mut engine = replayed(&[Record::Diverged(incident(1, 40, Some(back.clone())))]);
    for number in [0, 1] {
        let held = holding(1, &[(number, RankPhase::Training)]);
        attach(&mut engine, at(1.0), number, 1, held);
    }

    assert_eq!(
        engine.status().phase,
        PhaseName::Training,
        "generation 1 is the one that went back"
    );
    let actions = say(&mut engine, at(10.0), 1, crashed());
    assert_eq!(launched_rollbacks(&actions), [vec![back.clone()], vec![back]]);
}

#[test]
fn a_rollback_that_was_persisted_is_carried_out_by_the_next_coordinator() {
    let back = rollback(2, 41);
    let mut engine = replayed(&[Record::Diverged(incident(1, 40, Some(back.clone())))]);
    // The word of this rank's divergence is still on its way to its agent.
    attach(&mut engine, at(1.0), 0, 1, holding(1, &[(0, RankPhase::Training)]));

    let held = holding(1, &[(1, RankPhase::Training)]);
    let actions = attach(&mut engine, at(1.0), 1, 1, held);

    assert_eq!(launched_rollbacks(&actions), [vec![back.clone()], vec![back.clone()]]);
    assert_eq!(rollbacks(&engine), [back]);
}

#[test]
fn ranks_that_diverged_without_the_coordinator_are_heard_when_all_are_back() {
    let mut engine = replayed(&[]);
    let phase = |_| RankPhase::Diverged(diagnosis(40));
    let first = attach(&mut engine, at(1.0), 0, 1, holding(1, &[(0, phase(0))]));
    assert!(launches(&first).is_empty(), "node 1 may be back in a moment");
    assert_eq!(rollbacks(&engine), [rollback(2, 41)]);

    let actions = attach(&mut engine, at(2.0), 1, 1, holding(1, &[(1, phase(1))]));

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

    say(&mut engine, at(3.0), 0, diverged(40));

    assert_eq!(failure_of(&engine).class, Class::Diverged);
}

// ---- the rule ----

#[test]
fn a_rollback_condemns_what_is_older_than_it_and_not_before_its_step() {
    let restore = Restore { rollbacks: vec![rollback(3, 41)], ..Restore::default() };
    let condemned =
        |generation, step| restore.condemned_by(Generation(generation), Step(step)).is_some();
    assert!(condemned(2, 41) && condemned(1, 90));
    assert!(!condemned(2, 40) && !condemned(3, 41));
}
