//! Profiles.

use super::*;

const STEPS: u32 = 5;

fn request(engine: &mut Engine, now: Time) -> Vec<Action> {
    engine.drive(now, Event::Profile { name: "1".to_owned(), steps: STEPS })
}

fn directive(node: u32, attachment: u64) -> Action {
    let (generation, name) = (Generation(1), "1".to_owned());
    send(node, attachment, Directive::Profile { generation, name, steps: STEPS })
}

fn written(name: &str, problem: Option<&str>) -> RankReport {
    RankReport::Profiled { name: name.to_owned(), problem: problem.map(str::to_owned) }
}

/// Its result, if it has ended.
fn ended_with(actions: &[Action]) -> Option<Result<u32, &str>> {
    actions.iter().find_map(|action| match action {
        Action::ProfileEnded(result) => Some(result.as_ref().copied().map_err(String::as_str)),
        _ => None,
    })
}

#[test]
fn a_profile_is_recorded_once_every_rank_has_written_its_part() {
    let mut engine = training(&[1, 1]);
    assert_eq!(request(&mut engine, at(10.0)), [directive(0, 1), directive(1, 2)]);
    let busy = engine.can_profile(STEPS).unwrap_err();
    assert!(busy.contains("another profile"), "{busy}");
    assert_eq!(request(&mut engine, at(10.5)), []);

    assert_eq!(report(&mut engine, at(11.0), 1, written("1", None)), []);
    // Of a coordinator before this one.
    assert_eq!(report(&mut engine, at(11.0), 0, written("0", None)), []);
    let actions = report(&mut engine, at(12.0), 0, written("1", None));
    assert_eq!(actions, [Action::ProfileEnded(Ok(2))]);
    engine.can_profile(STEPS).unwrap();
}

#[test]
fn a_part_that_cannot_be_written_ends_the_profile_and_names_the_rank() {
    let mut engine = training(&[1, 1]);
    request(&mut engine, at(10.0));
    let actions = report(&mut engine, at(11.0), 1, written("1", Some("no space left")));
    let problem = "rank 1 could not write its part: no space left";
    assert_eq!(ended_with(&actions), Some(Err(problem)));
    // The part of the other rank comes later.
    assert_eq!(report(&mut engine, at(12.0), 0, written("1", None)), []);
    engine.can_profile(STEPS).unwrap();
}

#[test]
fn a_rank_or_a_node_that_is_lost_ends_the_profile() {
    let mut engine = training(&[1, 1]);
    request(&mut engine, at(10.0));
    let actions = report(&mut engine, at(11.0), 1, crashed());
    let problem = ended_with(&actions).unwrap().unwrap_err();
    assert!(problem.contains("interrupted"), "{problem}");

    let mut engine = training(&[1, 1]);
    request(&mut engine, at(10.0));
    let (node, attachment) = (node(1), attachment(&engine, 1));
    let actions = engine.drive(at(11.0), Event::Detached { node, attachment });
    let problem = "node node1 is not connected; try again when it is";
    assert_eq!(ended_with(&actions), Some(Err(problem)));
    let refused = engine.can_profile(STEPS).unwrap_err();
    assert!(refused.contains("not connected"), "{refused}");
}

#[test]
fn the_end_of_the_job_ends_the_profile() {
    let mut engine = training(&[1]);
    request(&mut engine, at(10.0));
    let actions = engine.drive(at(11.0), Event::Stop);
    let problem = ended_with(&actions).unwrap().unwrap_err();
    assert!(problem.contains("the job ended: stopped"), "{problem}");
}

#[test]
fn no_profile_is_recorded_without_training_or_of_an_odd_number_of_steps() {
    let mut paused = training(&[1]);
    paused.drive(at(10.0), Event::Pause { reason: "lunch".to_owned() });
    let mut draining = training(&[1]);
    draining.drive(at(10.0), Event::Drain { reason: "noon".to_owned() });
    for (mut engine, reason) in [(paused, "lunch"), (draining, "noon"), (ended(), "no training")] {
        let refused = engine.can_profile(STEPS).unwrap_err();
        assert!(refused.contains(reason), "{refused}");
        assert_eq!(request(&mut engine, at(11.0)), []);
    }
    for steps in [0, 51] {
        let refused = training(&[1]).can_profile(steps).unwrap_err();
        assert!(refused.contains("1 to 50"), "{refused}");
    }
}
