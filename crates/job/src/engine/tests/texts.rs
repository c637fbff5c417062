//! Texts of job events, and names for readers.

use super::*;
use crate::message::{Restored, SaveTimes};
use baton_recipe::Epoch;

/// The texts of one kind that are published when rank 0 reports this.
fn texts(engine: &mut Engine, kind: JobEventKind, rank_report: RankReport) -> Vec<String> {
    let event = rank_event(engine, engine.lifecycle.generation, 0, rank_report);
    let text = |action| match action {
        Action::Publish(published) if published.kind == kind => Some(published.message),
        _ => None,
    };
    engine.drive(at(10.0), event).into_iter().filter_map(text).collect()
}

#[test]
fn a_checkpoint_is_published_once_with_the_time_it_took() {
    let mut engine = training(&[1]);
    let took = Some(SaveTimes { stall_seconds: 0.12, seconds: 4.25 });
    let timed = RankReport::Saved(Commit { took, ..commit(1, 50) });
    assert_eq!(
        texts(&mut engine, JobEventKind::Saved, timed.clone()),
        ["checkpoint step-50 saved in 4.2 s; training was blocked for 120 ms"]
    );
    assert_eq!(texts(&mut engine, JobEventKind::Saved, timed), [""; 0], "reported again");
    // Found in the store: nobody measured it.
    assert_eq!(
        texts(&mut engine, JobEventKind::Saved, RankReport::Saved(commit(1, 60))),
        ["checkpoint step-60 saved"]
    );
    let elsewhere = RankReport::Saved(Commit { fence_lost: true, ..commit(1, 70) });
    assert_eq!(
        texts(&mut engine, JobEventKind::Saved, elsewhere),
        [
            "checkpoint step-70 saved; but not in the store that the coordinator sees, or that store has lost what this job \
          wrote: is its disk mounted, and checkpoint.dir the same folder on all machines?"
        ]
    );
}

#[test]
fn a_checkpoint_that_training_resumes_from_is_recorded_if_the_journal_lacks_it() {
    let records = [opened(1, vec![placement(0, 0, 0)]), Record::Saved(commit(1, 20))];
    for (step, is_unknown) in [(20, false), (30, true)] {
        let mut engine = replay(&records);
        attach(&mut engine, at(1.0), 0, 1, None);
        all_ready(&mut engine, at(1.1), None);
        report(&mut engine, at(1.2), 0, RankReport::Met);
        let restored = Restored { commit: Some(commit(1, step)), ..Restored::default() };
        let progress = Progress { step: Step(step), ..Progress::default() };
        let source = StateSource::Checkpoint(restored);
        let texts =
            texts(&mut engine, JobEventKind::Saved, RankReport::Started { source, progress });

        let expected =
            format!("checkpoint step-{step} was saved before; the journal did not know it");
        assert_eq!(texts, vec![expected; usize::from(is_unknown)]);
        assert_eq!(engine.status().commit, Some(commit(1, step)));
    }
}

#[test]
fn a_save_that_training_waits_for_is_published_with_what_to_do() {
    let waits = RankReport::SaveWaits { step: Step(90), behind: Step(60), seconds: 12.5 };

    let texts = texts(&mut training(&[1]), JobEventKind::SaveWaits, waits);

    assert_eq!(
        texts,
        [
            "training waits at step 90: a checkpoint is due, but the checkpoint of step 60 is still being \
          written after 12.5 s; use a faster store or save less often"
        ]
    );
}

#[test]
fn the_start_of_training_names_the_source_of_the_state() {
    let started = |source: StateSource| {
        let progress =
            Progress { step: Step(70), epoch: Epoch(3), cursor: 640, ..Progress::default() };
        let rank_report = RankReport::Started { source, progress };
        texts(&mut meeting(&[1]), JobEventKind::TrainingStarted, rank_report).remove(0)
    };
    let restored = Restored {
        local_of: None,
        name: "step-70".to_owned(),
        skipped: Vec::new(),
        changes: Vec::new(),
        world_size: 8,
        age_seconds: 300,
        lr: 0.0125,
        seconds: 1.5,
        commit: None,
    };
    let from = |restored: &Restored| started(StateSource::Checkpoint(restored.clone()));

    assert_eq!(started(StateSource::fresh()), "training from fresh weights");
    assert_eq!(
        started(StateSource::Fresh { skipped: vec!["step-60 of node a (damaged)".to_owned()] }),
        "training from fresh weights; SKIPPED: step-60 of node a (damaged)"
    );
    assert_eq!(
        started(StateSource::Survivor { rank: Rank(2) }),
        "training continues at epoch 3, step 70 with the state of rank 2"
    );
    let by_eight = "resumed in 1.50 s at epoch 3, step 70, sample 640 of the epoch, from checkpoint step-70, \
                    written by 8 ranks 300 s ago; learning rate 1.250e-2";
    assert_eq!(from(&restored), by_eight);
    let by_one = Restored { world_size: 1, ..restored.clone() };
    assert_eq!(from(&by_one), by_eight.replace("8 ranks", "1 rank"));
    let older = Restored { skipped: vec!["step-80: damaged".to_owned()], ..restored.clone() };
    assert_eq!(from(&older), format!("{by_eight}; SKIPPED: step-80: damaged"));
    let changes = vec!["train.epochs: 2 to 3".to_owned(), "seed: 1 to 2".to_owned()];
    assert_eq!(
        from(&Restored { changes, ..restored }),
        format!("{by_eight}; the recipe was changed: train.epochs: 2 to 3, seed: 1 to 2")
    );
}

#[test]
fn a_straggler_is_named_with_its_place_and_its_time() {
    let mut engine = training(&[2]);
    let mut straggler = Vec::new();
    for second in 0..=10u32 {
        for (rank, own_step_seconds) in [(0, 0.2), (1, 0.5)] {
            let heartbeat = RankHeartbeat { own_step_seconds, ..RankHeartbeat::default() };
            let event = rank_event(&engine, Generation(1), rank, RankReport::Heartbeat(heartbeat));
            straggler = engine.drive(at(f64::from(second)), event);
        }
    }
    let [Action::Publish(published)] = &straggler[..] else { panic!("{straggler:?}") };
    assert_eq!(
        published.message,
        "rank 1 (local rank 1 of node node0) delays the others: its own work takes 0.500 s per step, 2.5 times \
         the median of all ranks"
    );
}

/// They are in JSON and in the dashboard.
#[test]
fn states_of_ranks_have_names_that_scripts_may_read() {
    use RankState::{Done, Gone, Meeting, Ready, Starting, Training, Unknown, Waiting};
    let states = [Starting, Ready, Meeting, Training, Waiting, Gone, Done, Unknown];
    assert_eq!(
        states.map(RankState::name),
        ["starting", "ready", "meeting", "training", "waiting", "gone", "done", "unknown"]
    );
}

#[test]
fn the_state_of_each_rank_is_shown_as_it_changes() {
    let state = |engine: &Engine| engine.status().ranks[0].state;
    let mut engine = forming(&[1, 1]);
    assert_eq!(state(&engine), RankState::Starting);
    report(&mut engine, at(1.0), 0, ready(0, None));
    assert_eq!(state(&engine), RankState::Ready);
    report(&mut engine, at(1.1), 1, ready(1, None));
    assert_eq!(state(&engine), RankState::Meeting);
    all_started(&mut engine, at(2.0));
    assert_eq!(state(&engine), RankState::Training);
    report(&mut engine, at(3.0), 0, lost());
    assert_eq!(state(&engine), RankState::Waiting);
    assert_eq!(state(&reattaching(&[1])), RankState::Unknown);
    let mut last_steps = training(&[1, 1]);
    report(&mut last_steps, at(9.0), 0, done(Outcome::Completed, "d"));
    assert_eq!(state(&last_steps), RankState::Done);
}
