//! Local checkpoints: what is reported about them.

use super::*;

fn saved_locally(step: u64, seconds: f64) -> RankReport {
    RankReport::SavedLocally { step: Step(step), seconds }
}

fn published(actions: Vec<Action>) -> Vec<String> {
    let text = |action| match action {
        Action::Publish(event) => Some(event.message),
        _ => None,
    };
    actions.into_iter().filter_map(text).collect()
}

#[test]
fn the_newest_local_checkpoint_and_its_nodes_are_in_the_status_until_it_is_of_no_use() {
    let mut engine = training(&[1, 1]);
    let newest = |engine: &Engine| {
        let local = engine.status().local?;
        Some((local.step.0, local.names(), local.seconds))
    };
    assert_eq!(newest(&engine), None);
    report(&mut engine, at(1.0), 0, saved_locally(10, 0.2));
    assert_eq!(newest(&engine), Some((10, "node0".to_owned(), 0.2)));
    report(&mut engine, at(1.0), 1, saved_locally(10, 0.3));
    assert_eq!(newest(&engine), Some((10, "node0, node1".to_owned(), 0.3)));
    report(&mut engine, at(2.0), 1, saved_locally(20, 0.1));
    report(&mut engine, at(2.0), 0, saved_locally(10, 0.9));
    assert_eq!(newest(&engine), Some((20, "node1".to_owned(), 0.1)), "a late report");

    let begins_at = |step| {
        let progress = Progress { step: Step(step), ..Progress::default() };
        RankReport::Started { source: StateSource::fresh(), progress }
    };
    report(&mut engine, at(3.0), 0, begins_at(20));
    assert_eq!(newest(&engine), Some((20, "node1".to_owned(), 0.1)));
    report(&mut engine, at(4.0), 0, begins_at(19));
    assert_eq!(newest(&engine), None, "training did not continue from it");
}

#[test]
fn a_rollback_forgets_the_local_checkpoint() {
    let mut engine = training(&[1]);
    report(&mut engine, at(1.0), 0, saved_locally(10, 0.2));
    let rollback =
        Rollback { generation: Generation(2), before: Step(30), suspect_from: None, skip: None };
    let diagnosis = divergence::diagnosis(30);
    let rollback = Some(rollback);
    engine.record_incident(&Incident { generation: Generation(1), diagnosis, rollback });
    assert_eq!(engine.status().local, None);
}

#[test]
fn a_drain_says_when_a_machine_has_the_state_and_if_only_that_will_be_in_time() {
    let mut engine = training(&[1]);
    let took = Some(SaveTimes { stall_seconds: 0.0, seconds: 40.0 });
    report(&mut engine, at(1.0), 0, RankReport::Saved(Commit { took, ..commit(1, 7) }));
    report(&mut engine, at(2.0), 0, saved_locally(8, 0.4));
    let texts = published(depart(&mut engine, at(10.0), 0, Some(30.0)));
    assert_eq!(
        texts,
        [
            "saving and stopping, 30 s are left: node node0: spot notice; the store may be too slow, the last checkpoint took \
          40.0 s; then the job continues from the local checkpoint, which takes 0.4 s, if its machine comes back"
        ]
    );
    report(&mut engine, at(11.0), 0, RankReport::Stopping { step: Step(9) });
    let mut locally = |step| {
        let event = rank_event(&engine, engine.lifecycle.generation, 0, saved_locally(step, 0.5));
        published(engine.drive(at(12.0), event))
    };
    assert_eq!(locally(8), [""; 0], "an older state");
    assert_eq!(
        locally(9),
        ["the state after step 9 is in a local checkpoint, 2.0 s after the request; 28 s are left"]
    );
}

#[test]
fn a_machine_that_has_the_state_before_rank_0_reports_the_last_step_counts() {
    let mut engine = training(&[1]);
    depart(&mut engine, at(10.0), 0, Some(30.0));
    report(&mut engine, at(11.0), 0, saved_locally(9, 0.5));
    let stopping = RankReport::Stopping { step: Step(9) };
    let event = rank_event(&engine, engine.lifecycle.generation, 0, stopping);
    let texts = published(engine.drive(at(12.0), event));
    assert!(texts.iter().any(|text| text.contains("is in a local checkpoint")), "{texts:?}");
}

#[test]
fn the_end_names_the_machine_that_alone_has_the_state() {
    let step = StepReport { step: Step(19), ..StepReport::default() };
    // Not every update is reported.
    for last in [RankReport::Stepped(step), RankReport::Stopping { step: Step(19) }] {
        let mut engine = training(&[1]);
        report(&mut engine, at(1.0), 0, RankReport::Saved(commit(1, 7)));
        depart(&mut engine, at(10.0), 0, Some(5.0));
        report(&mut engine, at(10.5), 0, last);
        report(&mut engine, at(11.0), 0, saved_locally(19, 0.5));
        engine.drive(at(15.0), Event::Tick);
        let outcome = engine.outcome().unwrap().to_string();
        let end = "ranks did not stop in time, and the state after step 19 is not in the store, only in the local checkpoint \
                   of node0: start the job with this machine again to continue from it";
        assert!(outcome.contains(end), "{outcome}");
    }
}

#[test]
fn a_local_checkpoint_that_fails_is_published_with_its_node_and_is_no_problem_of_the_store() {
    let mut engine = training(&[1]);
    let message = "cannot write part: the disk is full".to_owned();
    let failed = RankReport::LocalSaveFailed { message };
    let event = rank_event(&engine, engine.lifecycle.generation, 0, failed);
    assert_eq!(
        published(engine.drive(at(10.0), event)),
        [
            "node node0: the local checkpoint failed, and training continues: cannot write part: the disk is full"
        ]
    );
    assert_eq!(engine.status().save_problem, None);
}
