//! Evaluations, and ends before the last epoch.

use super::*;
use baton_recipe::{
    Epoch,
    progress::{Extent, Fit},
};

fn top1(top1: f64) -> Accuracy {
    Accuracy::before_names(360, 0.321, (top1, 0.997), None)
}

fn fit(spearman: f64) -> Accuracy {
    let fit = Some(Fit { mae: 0.125, pearson: 0.5, spearman });
    Accuracy::before_names(360, 0.04, (0.0, 0.0), fit)
}

fn evaluated(step: u64, accuracy: Accuracy, ema: Option<Accuracy>, extent: Extent) -> RankNews {
    RankNews::Evaluated { step: Step(step), epoch: Epoch(4), accuracy, ema, extent }
}

fn announced(engine: &mut Engine, news: RankNews) -> Vec<(NoticeKind, String)> {
    let generation = engine.lifecycle.generation;
    let event = report(engine, generation, 0, news);
    let notice = |action| match action {
        Action::Announce(Notice { kind, message, .. }) => Some((kind, message)),
        Action::Persist(Record::Evaluated { .. }) | Action::Measured(_) => None,
        other => panic!("{other:?}"),
    };
    engine.handle(at(10.0), event).into_iter().filter_map(notice).collect()
}

#[test]
fn an_evaluation_is_announced_with_what_fits_its_task() {
    let mut engine = training(&[1]);
    let mut words = |step, accuracy, ema, extent| {
        let mut announced = announced(&mut engine, evaluated(step, accuracy, ema, extent));
        announced.remove(0).1
    };
    assert_eq!(
        words(87, top1(0.912), None, Extent::Full),
        "epoch 4: validation top-1 91.20 %, top-5 99.70 %, loss 0.3210"
    );
    assert_eq!(
        words(88, top1(0.912), Some(top1(0.921)), Extent::Subset),
        "epoch 4: quick validation top-1 91.20 % (EMA 92.10 %), top-5 99.70 %, loss 0.3210"
    );
    assert_eq!(
        words(89, fit(0.75), Some(fit(0.8)), Extent::Full),
        "epoch 4: validation Spearman 0.7500 (EMA 0.8000), Pearson 0.5000, MAE 0.1250, loss 0.0400"
    );
}

fn best_after(evaluations: &[(u64, Accuracy, Option<Accuracy>, Extent)]) -> (Step, Accuracy) {
    let mut engine = training(&[1]);
    for (step, accuracy, ema, extent) in evaluations {
        say(&mut engine, at(10.0), 0, evaluated(*step, accuracy.clone(), ema.clone(), *extent));
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
fn a_full_look_at_the_same_weights_replaces_the_quick_one() {
    let best =
        best_after(&[(10, top1(0.7), None, Extent::Subset), (10, top1(0.6), None, Extent::Full)]);
    assert_eq!(best, (Step(10), top1(0.6)));
}

#[test]
fn an_evaluation_is_announced_once_however_often_it_is_told() {
    let mut engine = training(&[1]);
    let mut times =
        |step, extent| announced(&mut engine, evaluated(step, top1(0.5), None, extent)).len();
    assert_eq!(times(10, Extent::Subset), 1);
    assert_eq!(times(10, Extent::Full), 1);
    assert_eq!(times(20, Extent::Full), 1);
    // An agent that lost its coordinator tells all again.
    assert_eq!(times(10, Extent::Subset) + times(10, Extent::Full) + times(20, Extent::Full), 0);
    // What was learnt since a rollback is another thing.
    engine.lifecycle.generation = Generation(2);
    let event = report(&engine, Generation(2), 0, evaluated(15, top1(0.4), None, Extent::Full));
    assert!(!engine.handle(at(10.0), event).is_empty());
}

#[test]
fn an_evaluation_whose_rank_died_before_it_told_is_announced_when_the_others_begin() {
    let mut engine = training(&[1]);
    say(&mut engine, at(10.0), 0, evaluated(10, top1(0.5), None, Extent::Full));
    let mut began_after = |step, top1_share, extent| {
        let mut progress = Progress { step: Step(step), epoch: Epoch(3), ..Progress::default() };
        progress.note_evaluation(top1(top1_share), None, extent);
        announced(
            &mut engine,
            RankNews::Started { source: StateSource::Survivor { rank: Rank(0) }, progress },
        )
    };
    let kinds = |told: &[(NoticeKind, String)]| told.iter().map(|(kind, _)| *kind).collect();
    let told = began_after(20, 0.75, Extent::Subset);
    let both: Vec<NoticeKind> = kinds(&told);
    assert_eq!(both, [NoticeKind::Evaluated, NoticeKind::TrainingStarted]);
    assert!(told[0].1.starts_with("epoch 3: quick validation top-1 75.00 %"), "{}", told[0].1);
    // Known, and older, as after a rollback.
    let known: Vec<NoticeKind> = kinds(&began_after(20, 0.75, Extent::Subset));
    let older: Vec<NoticeKind> = kinds(&began_after(10, 0.5, Extent::Full));
    assert_eq!(
        (known, older),
        (vec![NoticeKind::TrainingStarted], vec![NoticeKind::TrainingStarted])
    );
}

#[test]
fn evaluations_survive_the_coordinator() {
    let mut engine = training(&[1]);
    let mut records = vec![Record::Created(origin())];
    for (step, share) in [(10, 0.75), (20, 0.5)] {
        let news = evaluated(step, top1(share), Some(top1(share / 2.0)), Extent::Full);
        let actions = say(&mut engine, at(10.0), 0, news);
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
fn an_early_end_is_announced_and_completes_the_job() {
    let mut engine = training(&[1]);
    let reason = "limits.target_top1 = 0.9 is reached: top-1 91.20 % after epoch 4".to_owned();

    let announced = announced(&mut engine, RankNews::EndsEarly { reason: reason.clone() });

    assert_eq!(announced, [(NoticeKind::EndsEarly, format!("training is complete: {reason}"))]);
    say(&mut engine, at(11.0), 0, done(Outcome::Completed, "d"));
    assert_eq!(engine.outcome(), Some(&Outcome::Completed));
}

// ---- the time that is left ----

#[test]
fn the_time_left_counts_samples_and_so_is_the_same_in_every_phase() {
    let left = |news: StepNews| {
        let mut engine = training(&[1]);
        say(&mut engine, at(10.0), 0, RankNews::Stepped(news));
        engine.status().eta_seconds()
    };
    let early = StepNews {
        step: Step(25),
        epoch: Epoch(1),
        step_of_epoch: 5,
        steps_per_epoch: 20,
        global_batch: 64,
        samples_per_second: 48.0,
        ..StepNews::default()
    };
    // Of the recipe's two epochs 15 batches are left.
    assert_eq!(left(early.clone()), Some(20.0));
    let larger_batch = StepNews {
        step: Step(22),
        step_of_epoch: 2,
        steps_per_epoch: 5,
        global_batch: 240,
        ..early.clone()
    };
    assert_eq!(left(larger_batch), Some(15.0));
    assert_eq!(left(StepNews { epoch: Epoch(2), step_of_epoch: 0, ..early.clone() }), Some(0.0));
    assert_eq!(left(StepNews { samples_per_second: 0.0, ..early }), None);
}
