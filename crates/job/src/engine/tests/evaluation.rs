//! Evaluations, and ends before the last epoch.

use super::*;
use crate::{
    Epoch,
    progress::{Extent, Fit},
};

fn top1(top1: f64) -> Accuracy {
    Accuracy { loss: 0.321, top1, top5: 0.997, samples: 360, fit: None }
}

fn fit(spearman: f64) -> Accuracy {
    let fit = Some(Fit { mae: 0.125, pearson: 0.5, spearman });
    Accuracy { loss: 0.04, samples: 360, fit, ..Accuracy::default() }
}

fn evaluated(step: u64, accuracy: Accuracy, ema: Option<Accuracy>, extent: Extent) -> RankNews {
    RankNews::Evaluated { step: Step(step), epoch: Epoch(4), accuracy, ema, extent }
}

fn announced(engine: &mut Engine, news: RankNews) -> Vec<(NoticeKind, String)> {
    let generation = engine.generation;
    let event = report(engine, generation, 0, news);
    let notice = |action| match action {
        Action::Announce(Notice { kind, message, .. }) => (kind, message),
        other => panic!("{other:?}"),
    };
    engine.handle(at(10.0), event).into_iter().map(notice).collect()
}

#[test]
fn an_evaluation_is_announced_with_what_fits_its_task() {
    let mut engine = training(&[1]);
    let mut words = |accuracy, ema, extent| {
        let mut announced = announced(&mut engine, evaluated(88, accuracy, ema, extent));
        announced.remove(0).1
    };
    assert_eq!(
        words(top1(0.912), None, Extent::Full),
        "epoch 4: validation top-1 91.20 %, top-5 99.70 %, loss 0.3210"
    );
    assert_eq!(
        words(top1(0.912), Some(top1(0.921)), Extent::Subset),
        "epoch 4: quick validation top-1 91.20 % (EMA 92.10 %), top-5 99.70 %, loss 0.3210"
    );
    assert_eq!(
        words(fit(0.75), Some(fit(0.8)), Extent::Full),
        "epoch 4: validation Spearman 0.7500 (EMA 0.8000), Pearson 0.5000, MAE 0.1250, loss 0.0400"
    );
}

fn best_after(evaluations: &[(u64, Accuracy, Option<Accuracy>, Extent)]) -> (Step, Accuracy) {
    let mut engine = training(&[1]);
    for (step, accuracy, ema, extent) in evaluations {
        say(&mut engine, at(10.0), 0, evaluated(*step, *accuracy, *ema, *extent));
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
