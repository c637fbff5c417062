//! Evaluations, and jobs that end before their last epoch.

use super::*;
use baton_recipe::{
    Epoch,
    progress::{Extent, Fit, PastEvaluation},
};

fn top1(top1: f64) -> Accuracy {
    Accuracy::from_legacy_fields(360, 0.321, (top1, 0.997), None)
}

fn fit(spearman: f64) -> Accuracy {
    let fit = Some(Fit { mae: 0.125, pearson: 0.5, spearman });
    Accuracy::from_legacy_fields(360, 0.04, (0.0, 0.0), fit)
}

fn evaluated(step: u64, accuracy: Accuracy, ema: Option<Accuracy>, extent: Extent) -> RankReport {
    let texts = Vec::new();
    RankReport::Evaluated { step: Step(step), epoch: Epoch(4), accuracy, ema, extent, texts }
}

fn published(engine: &mut Engine, rank_report: RankReport) -> Vec<(JobEventKind, String)> {
    let generation = engine.lifecycle.generation;
    let event = rank_event(engine, generation, 0, rank_report);
    let published = |action| match action {
        Action::Publish(JobEvent { kind, message, .. }) => Some((kind, message)),
        Action::Persist(Record::Evaluated { .. }) | Action::AddPoint(_) => None,
        other => panic!("{other:?}"),
    };
    engine.drive(at(10.0), event).into_iter().filter_map(published).collect()
}

#[test]
fn an_evaluation_is_published_with_the_metrics_of_its_task() {
    let mut engine = training(&[1]);
    let mut text = |step, accuracy, ema, extent| {
        let mut published = published(&mut engine, evaluated(step, accuracy, ema, extent));
        published.remove(0).1
    };
    assert_eq!(
        text(87, top1(0.912), None, Extent::Full),
        "epoch 4: validation top-1 91.20 %, top-5 99.70 %, loss 0.3210"
    );
    assert_eq!(
        text(88, top1(0.912), Some(top1(0.921)), Extent::Subset),
        "epoch 4: quick validation top-1 91.20 % (EMA 92.10 %), top-5 99.70 %, loss 0.3210"
    );
    assert_eq!(
        text(89, fit(0.75), Some(fit(0.8)), Extent::Full),
        "epoch 4: validation Spearman 0.7500 (EMA 0.8000), Pearson 0.5000, MAE 0.1250, loss 0.0400"
    );
}

fn best_after(evaluations: &[(u64, Accuracy, Option<Accuracy>, Extent)]) -> (Step, Accuracy) {
    let mut engine = training(&[1]);
    for (step, accuracy, ema, extent) in evaluations {
        report(&mut engine, at(10.0), 0, evaluated(*step, accuracy.clone(), ema.clone(), *extent));
    }
    engine.status().best.unwrap()
}

#[test]
fn the_best_is_the_better_of_raw_and_averaged_weights() {
    let full = Extent::Full;
    let best = best_after(&[
        (10, top1(0.5), Some(top1(0.7)), full),
        (20, top1(0.6), Some(top1(0.4)), full),
    ]);
    assert_eq!(best, (Step(10), top1(0.7)));
}

#[test]
fn the_best_of_a_regression_has_the_highest_rank_correlation() {
    let best =
        best_after(&[(10, fit(0.2), None, Extent::Full), (20, fit(0.6), None, Extent::Full)]);
    assert_eq!(best, (Step(20), fit(0.6)));
}

#[test]
fn a_full_evaluation_of_the_same_weights_replaces_the_quick_one() {
    let best =
        best_after(&[(10, top1(0.7), None, Extent::Subset), (10, top1(0.6), None, Extent::Full)]);
    assert_eq!(best, (Step(10), top1(0.6)));
}

#[test]
fn a_full_evaluation_replaces_only_a_best_of_the_same_step() {
    let best = best_after(&[
        (10, top1(0.9), None, Extent::Full),
        (20, top1(0.5), None, Extent::Subset),
        (20, top1(0.6), None, Extent::Full),
    ]);
    assert_eq!(best, (Step(10), top1(0.9)));
}

#[test]
fn an_evaluation_that_is_reported_again_is_published_only_once() {
    let mut engine = training(&[1]);
    let mut times =
        |step, extent| published(&mut engine, evaluated(step, top1(0.5), None, extent)).len();
    assert_eq!(times(10, Extent::Subset), 1);
    assert_eq!(times(10, Extent::Full), 1);
    assert_eq!(times(20, Extent::Full), 1);
    // An agent that reconnects reports all evaluations again.
    assert_eq!(times(10, Extent::Subset) + times(10, Extent::Full) + times(20, Extent::Full), 0);
    // After a rollback, an evaluation at an earlier step is new.
    engine.lifecycle.generation = Generation(2);
    let event = rank_event(&engine, Generation(2), 0, evaluated(15, top1(0.4), None, Extent::Full));
    assert!(!engine.drive(at(10.0), event).is_empty());
}

#[test]
fn an_evaluation_whose_rank_died_before_its_report_is_published_when_the_others_start() {
    let mut engine = training(&[1]);
    report(&mut engine, at(10.0), 0, evaluated(10, top1(0.5), None, Extent::Full));
    let mut began_after = |step, top1_share, extent| {
        let mut progress = Progress { step: Step(step), epoch: Epoch(3), ..Progress::default() };
        progress.record_evaluation(top1(top1_share), None, extent);
        published(
            &mut engine,
            RankReport::Started { source: StateSource::Survivor { rank: Rank(0) }, progress },
        )
    };
    let kinds = |events: &[(JobEventKind, String)]| events.iter().map(|(kind, _)| *kind).collect();
    let events = began_after(20, 0.75, Extent::Subset);
    let both: Vec<JobEventKind> = kinds(&events);
    assert_eq!(both, [JobEventKind::Evaluated, JobEventKind::TrainingStarted]);
    assert!(events[0].1.starts_with("epoch 3: quick validation top-1 75.00 %"), "{}", events[0].1);
    // Not published: an evaluation that is known, and an older one, as after a rollback.
    let known: Vec<JobEventKind> = kinds(&began_after(20, 0.75, Extent::Subset));
    let older: Vec<JobEventKind> = kinds(&began_after(10, 0.5, Extent::Full));
    assert_eq!(
        (known, older),
        (vec![JobEventKind::TrainingStarted], vec![JobEventKind::TrainingStarted])
    );
    // A lost coordinator may have published it a moment before its end: the copy of its journal lacks it.
    let lacking: Vec<JobEventKind> = kinds(&began_after(15, 0.6, Extent::Full));
    assert_eq!(lacking, [JobEventKind::Evaluated, JobEventKind::TrainingStarted]);
}

#[test]
fn evaluations_that_were_not_passed_on_are_published_at_the_next_start() {
    let mut engine = training(&[1]);
    report(&mut engine, at(10.0), 0, evaluated(16, top1(0.1), None, Extent::Full));
    let mut progress = Progress::default();
    for (step, share) in [(16, 0.1), (28, 0.2), (40, 0.3)] {
        progress.step = Step(step);
        progress.epoch = Epoch(step as u32 / 4);
        progress.record_evaluation(top1(share), None, Extent::Full);
    }
    progress.step = Step(45);
    let source = StateSource::Survivor { rank: Rank(0) };
    let mut begins = || {
        let events = published(
            &mut engine,
            RankReport::Started { source: source.clone(), progress: progress.clone() },
        );
        let texts = events.into_iter().filter(|(kind, _)| *kind == JobEventKind::Evaluated);
        texts.map(|(_, text)| text.split(':').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let firsts = begins();
    assert!(firsts.len() == 2 && firsts[0].starts_with("epoch 7"), "{firsts:?}");
    assert!(firsts[1].starts_with("epoch 10"), "{firsts:?}");
    assert_eq!(begins(), [""; 0], "once");
    assert_eq!(engine.status().evaluation.unwrap().step, Step(40));

    // An older one does not replace a newer one that is known, nor after a restart of the coordinator.
    let mut engine = training(&[1]);
    report(&mut engine, at(10.0), 0, evaluated(40, top1(0.3), None, Extent::Full));
    let actions = report(&mut engine, at(11.0), 0, RankReport::Started { source, progress });
    assert_eq!(engine.status().evaluation.unwrap().step, Step(40));
    let records: Vec<Record> = actions
        .into_iter()
        .filter_map(|action| match action {
            Action::Persist(record @ Record::Evaluated { .. }) => Some(record),
            _ => None,
        })
        .collect();
    let first = Record::Evaluated {
        generation: Generation(1),
        evaluation: EvaluationResult {
            step: Step(40),
            accuracy: top1(0.3),
            ema: None,
            extent: Extent::Full,
            texts: vec![],
        },
    };
    let records = [vec![opened(1, vec![placement(0, 0, 0)]), first], records].concat();
    assert_eq!(replay(&records).status().evaluation.unwrap().step, Step(40));
}

#[test]
fn past_evaluations_that_no_rank_has_are_refused() {
    let past = |step, epoch| PastEvaluation {
        step: Step(step),
        epoch: Epoch(epoch),
        extent: Extent::Full,
        accuracy: top1(0.1),
        ema: None,
    };
    let started = |newest_evaluations| RankReport::Started {
        source: StateSource::fresh(),
        progress: Progress { step: Step(5), newest_evaluations, ..Progress::default() },
    };
    let stale = |newest_evaluations| {
        let mut engine = training(&[1]);
        report(&mut engine, at(9.0), 0, started(newest_evaluations));
        engine.status().stale_messages
    };
    assert_eq!(stale(vec![past(5, 1); 16]), 0);
    assert_eq!(stale(vec![past(5, 1); 17]), 1);
    assert_eq!(stale(vec![past(6, 1)]), 1, "after the state");
    assert_eq!(stale(vec![past(5, u32::MAX)]), 1);
}

#[test]
fn an_evaluation_after_a_restart_from_an_earlier_step_replaces_a_later_one_and_is_published_once() {
    let mut engine = training(&[1]);
    report(&mut engine, at(9.0), 0, stepped(100));
    report(&mut engine, at(10.0), 0, evaluated(100, top1(0.5), None, Extent::Full));
    report(&mut engine, at(11.0), 0, crashed());
    tick(&mut engine, at(30.0));
    all_ready(&mut engine, at(31.0), None);
    let progress = Progress { step: Step(50), ..Progress::default() };
    let source = StateSource::fresh();
    report(&mut engine, at(32.0), 0, RankReport::Started { source, progress });

    let result = || evaluated(60, top1(0.3), None, Extent::Full);
    let mut texts = || published(&mut engine, result()).len();
    assert_eq!([texts(), texts()], [1, 0]);
    assert_eq!(engine.status().evaluation.unwrap().step, Step(60));
}

#[test]
fn evaluations_survive_the_coordinator() {
    let mut engine = training(&[1]);
    let mut records = vec![Record::Created(origin())];
    for (step, share) in [(10, 0.75), (20, 0.5)] {
        let rank_report = evaluated(step, top1(share), Some(top1(share / 2.0)), Extent::Full);
        let actions = report(&mut engine, at(10.0), 0, rank_report);
        records.extend(actions.into_iter().filter_map(|action| match action {
            Action::Persist(record) => Some(record),
            _ => None,
        }));
    }
    let replayed = Engine::replay(&spec(1), &records, at(0.0)).unwrap().status();
    let status = engine.status();
    assert_eq!((&replayed.evaluation, &replayed.best), (&status.evaluation, &status.best));
    assert_eq!(replayed.best.unwrap().0, Step(10));
    assert_eq!(replayed.evaluation.unwrap().ema, Some(top1(0.25)));
}

#[test]
fn the_best_evaluation_of_the_run_that_is_continued_survives_the_coordinator() {
    let best_after_restart = |best: (u64, f64), known: (u64, f64)| {
        let mut engine = training(&[1]);
        let mut progress = Progress { step: Step(known.0), ..Progress::default() };
        progress.record_evaluation(top1(known.1), None, Extent::Full);
        // The newest evaluations of a state may lack it.
        progress.best = Some((Step(best.0), top1(best.1)));
        progress.step = Step(45);
        let source = StateSource::Survivor { rank: Rank(0) };
        let started = RankReport::Started { source, progress };
        let mut records = vec![Record::Created(origin())];
        for _ in 0..2 {
            let actions = report(&mut engine, at(10.0), 0, started.clone());
            records.extend(actions.into_iter().filter_map(|action| match action {
                Action::Persist(record) => Some(record),
                _ => None,
            }));
        }
        let is_best = |record: &&Record| matches!(record, Record::Best { .. });
        assert!(records.iter().filter(is_best).count() <= 1, "once: {records:?}");
        let replayed = Engine::replay(&spec(1), &records, at(0.0)).unwrap().status().best;
        assert_eq!(replayed, engine.status().best);
        replayed.unwrap().0
    };
    assert_eq!(best_after_restart((10, 0.75), (40, 0.5)), Step(10));
    assert_eq!(best_after_restart((10, 0.5), (40, 0.5)), Step(10), "the first of equal ones");
    assert_eq!(best_after_restart((40, 0.5), (40, 0.5)), Step(40));
}

#[test]
fn an_early_end_is_published_and_completes_the_job() {
    let mut engine = training(&[1]);
    let reason = "limits.target_top1 = 0.9 is reached: top-1 91.20 % after epoch 4".to_owned();

    let published = published(&mut engine, RankReport::EndsEarly { reason: reason.clone() });

    assert_eq!(published, [(JobEventKind::EndsEarly, format!("training is complete: {reason}"))]);
    report(&mut engine, at(11.0), 0, done(Outcome::Completed, "d"));
    assert_eq!(engine.outcome(), Some(&Outcome::Completed));
}

// ---- evaluations and checkpoints ----

#[test]
fn a_checkpoint_has_the_accuracy_of_an_evaluation_that_ends_before_or_after_its_commit() {
    let accuracy = |reports: [RankReport; 2]| {
        let mut engine = training(&[1]);
        for rank_report in reports {
            report(&mut engine, at(10.0), 0, rank_report);
        }
        engine.status().commit.unwrap().accuracy
    };
    let saved = |step| RankReport::Saved(commit(1, step));
    let evaluation = || evaluated(20, top1(0.75), None, Extent::Full);
    assert_eq!(accuracy([saved(20), evaluation()]), Some(top1(0.75)));
    assert_eq!(accuracy([evaluation(), saved(20)]), Some(top1(0.75)));
    assert_eq!(accuracy([evaluation(), saved(21)]), None);
}

#[test]
fn an_evaluation_made_again_because_the_checkpoint_lacks_it_is_published_only_once() {
    let mut engine = training(&[1]);
    let evaluation = || evaluated(20, top1(0.75), None, Extent::Full);
    assert_eq!(published(&mut engine, evaluation()).len(), 1);
    engine.lifecycle.generation = Generation(2);
    engine.lifecycle.began_at = Some(Step(20));
    let mut again = |rank_report| {
        let event = rank_event(&engine, Generation(2), 0, rank_report);
        engine.drive(at(11.0), event).len()
    };
    assert_eq!(again(evaluation()), 0);
    let other = evaluated(20, top1(0.5), None, Extent::Full);
    assert_ne!(again(other), 0, "another result is news");
}

// ---- the time left ----

fn evaluating(samples: u64, seconds: f64) -> RankReport {
    let evaluation =
        Some(EvaluationProgress { samples, total: 1000, seconds, ..EvaluationProgress::default() });
    RankReport::Heartbeat(RankHeartbeat { evaluation, ..RankHeartbeat::default() })
}

#[test]
fn an_evaluation_shows_its_progress_and_the_time_left_includes_the_ones_to_come() {
    let mut engine = training(&[1]);
    let mut left_after = |rank_report| {
        report(&mut engine, at(10.0), 0, rank_report);
        (engine.status().evaluating, engine.status().eta_seconds())
    };
    let step = StepReport {
        step: Step(20),
        epoch: Epoch(1),
        steps_per_epoch: 20,
        global_batch: 64,
        samples_per_second: 64.0,
        ..StepReport::default()
    };
    // One of the recipe's two epochs is left.
    assert_eq!(left_after(RankReport::Stepped(step)), (None, Some(20.0)));
    assert_eq!(left_after(evaluating(0, 0.5)).1, Some(20.0));
    let (progress, left) = left_after(evaluating(250, 2.0));
    assert_eq!(progress.unwrap().samples_per_second(), Some(125.0));
    assert_eq!(left, Some(20.0 + 6.0 + 8.0), "6 s of this evaluation, 8 s of the next one");
    let idle = RankReport::Heartbeat(RankHeartbeat::default());
    assert_eq!(left_after(idle), (None, Some(20.0 + 8.0)));
}

#[test]
fn an_evaluation_with_texts_lasts_at_least_as_long_as_the_last_one() {
    let mut engine = training(&[1]);
    let step = StepReport { step: Step(20), epoch: Epoch(1), ..StepReport::default() };
    report(&mut engine, at(10.0), 0, RankReport::Stepped(step));
    let mut after = |samples, texts, seconds| {
        let (total, total_texts) = (1000, 8);
        let progress = EvaluationProgress { samples, total, texts, total_texts, seconds };
        let evaluation = Some(progress);
        let heartbeat = RankHeartbeat { evaluation, ..RankHeartbeat::default() };
        report(&mut engine, at(10.0), 0, RankReport::Heartbeat(heartbeat));
        (progress.samples_per_second(), progress.seconds_left(), engine.status().evaluation_seconds)
    };
    assert_eq!(after(500, 0, 2.0), (Some(250.0), None, 2.0));
    assert_eq!(after(1000, 4, 30.0), (None, None, 30.0), "the recipe's second epoch is left");
    assert_eq!(after(500, 0, 2.0).2, 30.0);
}

#[test]
fn the_last_epoch_and_every_few_are_evaluated() {
    let evaluations_left = |every: u32, epoch: u32| {
        let every = format!("evaluation.every_epochs={every}");
        let spec = spec_with(&["train.epochs=10", &every, "cluster.min_ranks=1"]);
        let mut engine = Engine::new(&spec, origin(), at(0.0));
        attach(&mut engine, at(0.0), 0, 1, None);
        all_ready(&mut engine, at(1.0), None);
        all_started(&mut engine, at(2.0));
        let step = StepReport { epoch: Epoch(epoch), ..StepReport::default() };
        report(&mut engine, at(10.0), 0, RankReport::Stepped(step));
        // An evaluation takes a second.
        report(&mut engine, at(10.0), 0, evaluating(1000, 1.0));
        report(&mut engine, at(11.0), 0, RankReport::Heartbeat(RankHeartbeat::default()));
        engine.status().evaluation_seconds
    };
    assert_eq!(evaluations_left(3, 0), 4.0, "after epochs 3, 6, 9 and 10");
    assert_eq!(evaluations_left(3, 3), 3.0);
    assert_eq!(evaluations_left(3, 9), 1.0);
    assert_eq!(evaluations_left(5, 0), 2.0);
}

#[test]
fn the_time_left_is_computed_from_samples_and_so_independent_of_the_batch_size() {
    let left = |rank_report: StepReport| {
        let mut engine = training(&[1]);
        report(&mut engine, at(10.0), 0, RankReport::Stepped(rank_report));
        engine.status().eta_seconds()
    };
    let early = StepReport {
        step: Step(25),
        epoch: Epoch(1),
        step_of_epoch: 5,
        steps_per_epoch: 20,
        global_batch: 64,
        samples_per_second: 48.0,
        ..StepReport::default()
    };
    // 15 batches of the recipe's two epochs are left.
    assert_eq!(left(early.clone()), Some(20.0));
    let larger_batch = StepReport {
        step: Step(22),
        step_of_epoch: 2,
        steps_per_epoch: 5,
        global_batch: 240,
        ..early.clone()
    };
    assert_eq!(left(larger_batch), Some(15.0));
    assert_eq!(left(StepReport { epoch: Epoch(2), step_of_epoch: 0, ..early.clone() }), Some(0.0));
    assert_eq!(left(StepReport { samples_per_second: 0.0, ..early }), None);
}
