//! Every request in every phase: what happens at once, and what follows when the phase takes its course. Notices of
//! machines, signals and files reach the engine as these requests; `session/tests.rs` tests that part.

use super::*;

/// `request while phase: what happens at once; then what follows`.
const TABLE: &str = "\
drain while gathering: ends as drained; then -
drain while forming: -; then ranks save and stop
drain while meeting: -; then ranks save and stop
drain while training: ranks save and stop; then -
drain while paused: ranks save and stop; then -
drain while draining: -; then -
drain while rolling back: -; then ranks save and stop
drain while detecting: -; then opens a generation, ranks save and stop
drain while backoff: opens a generation; then ranks save and stop
drain while reattaching: -; then ranks save and stop
drain while ended: -; then -
notice, too few nodes stay while gathering: ends as drained; then -
notice, too few nodes stay while forming: -; then ranks save and stop
notice, too few nodes stay while meeting: -; then ranks save and stop
notice, too few nodes stay while training: ranks save and stop; then -
notice, too few nodes stay while paused: ranks save and stop; then -
notice, too few nodes stay while draining: -; then -
notice, too few nodes stay while rolling back: -; then ranks save and stop
notice, too few nodes stay while detecting: -; then opens a generation, ranks save and stop
notice, too few nodes stay while backoff: opens a generation; then ranks save and stop
notice, too few nodes stay while reattaching: refused
notice, too few nodes stay while ended: refused
notice, enough nodes stay while gathering: ends as drained; then -
notice, enough nodes stay while forming: -; then opens a generation, the node is released
notice, enough nodes stay while meeting: -; then opens a generation, the node is released
notice, enough nodes stay while training: opens a generation; then the node is released
notice, enough nodes stay while paused: opens a generation, ranks start paused; then the node is released
notice, enough nodes stay while draining: -; then -
notice, enough nodes stay while rolling back: -; then opens a generation, the node is released
notice, enough nodes stay while detecting: -; then opens a generation, the node is released
notice, enough nodes stay while backoff: -; then opens a generation, the node is released
notice, enough nodes stay while reattaching: refused
notice, enough nodes stay while ended: refused
pause while gathering: -; then opens a generation, ranks start paused
pause while forming: ranks pause; then -
pause while meeting: ranks pause; then -
pause while training: ranks pause; then -
pause while paused: refused
pause while draining: refused
pause while rolling back: ranks pause; then -
pause while detecting: ranks pause; then opens a generation, ranks start paused
pause while backoff: -; then opens a generation, ranks start paused
pause while reattaching: -; then ranks pause
pause while ended: refused
checkpoint while gathering: refused
checkpoint while forming: refused
checkpoint while meeting: refused
checkpoint while training: ranks save; then -
checkpoint while paused: ranks save; then -
checkpoint while draining: ranks save; then -
checkpoint while rolling back: refused
checkpoint while detecting: refused
checkpoint while backoff: refused
checkpoint while reattaching: refused
checkpoint while ended: refused
stop while gathering: ends as stopped; then -
stop while forming: ends as stopped; then -
stop while meeting: ends as stopped; then -
stop while training: ends as stopped; then -
stop while paused: ends as stopped; then -
stop while draining: ends as stopped; then -
stop while rolling back: ends as stopped; then -
stop while detecting: ends as stopped; then -
stop while backoff: ends as stopped; then -
stop while reattaching: ends as stopped; then -
stop while ended: -; then -
";

/// The phases of a job with two ranks on two nodes.
fn phases() -> Vec<(&'static str, Engine)> {
    let paused = || {
        let mut engine = training(&[1, 1]);
        engine.drive(at(9.0), Event::Pause { reason: "lunch".to_owned() });
        engine
    };
    let draining = || {
        let mut engine = training(&[1, 1]);
        drain(&mut engine, at(9.0));
        engine
    };
    let rolling_back = || {
        let mut engine = training(&[1, 1]);
        report(&mut engine, at(9.0), 0, RankReport::Diverged(divergence::diagnosis(7)));
        engine
    };
    // The coordinator has just been restarted.
    let reattaching = || {
        let placements = training(&[1, 1]).lifecycle.world().unwrap().placements().to_vec();
        let journal = [Record::Created(origin()), opened(1, placements)];
        Engine::replay(&spec(1), &journal, at(9.5)).unwrap()
    };
    let mut gathering = gathering(2);
    attach(&mut gathering, at(0.0), 0, 1, None);
    vec![
        ("gathering", gathering),
        ("forming", forming(&[1, 1])),
        ("meeting", meeting(&[1, 1])),
        ("training", training(&[1, 1])),
        ("paused", paused()),
        ("draining", draining()),
        ("rolling back", rolling_back()),
        ("detecting", detecting()),
        ("backoff", backing_off()),
        ("reattaching", reattaching()),
        ("ended", ended()),
    ]
}

/// The actions that the ranks, the nodes or the user notice, as text; each kind once.
fn words(actions: &[Action]) -> Vec<&'static str> {
    let word = |action: &Action| match action {
        Action::Persist(Record::Ended(Outcome::Drained { .. })) => Some("ends as drained"),
        Action::Persist(Record::Ended(Outcome::Stopped)) => Some("ends as stopped"),
        Action::Persist(Record::Opened { .. }) => Some("opens a generation"),
        Action::Send { directive: Directive::Launch(launch), .. } if launch.pause.paused => {
            Some("ranks start paused")
        }
        Action::Send { directive: Directive::Drain { .. }, .. } => Some("ranks save and stop"),
        Action::Send { directive: Directive::Checkpoint { .. }, .. } => Some("ranks save"),
        Action::Send { directive: Directive::Pause(state), .. } if state.paused => {
            Some("ranks pause")
        }
        Action::Send { directive: Directive::Pause(_), .. } => Some("ranks resume"),
        Action::Send { directive: Directive::Release { .. }, .. } => Some("the node is released"),
        _ => None,
    };
    let mut words: Vec<&str> = actions.iter().filter_map(word).collect();
    words.dedup();
    words
}

/// Lets the phase take its course until the ranks train or the job is over; returns what happens.
fn course(engine: &mut Engine) -> Vec<&'static str> {
    let mut happened = Vec::new();
    for moment in 1..100 {
        let now = at(10.0 + 0.1 * f64::from(moment));
        let actions = match engine.status().phase {
            PhaseName::Gathering if engine.nodes.values().count() < 2 => {
                attach(engine, now, 1, 1, None)
            }
            // A rank that has ended holds no state.
            PhaseName::Forming => all_ready(engine, now, Some(7)),
            PhaseName::Meeting => {
                let ranks = engine.status().ranks.len() as u32;
                (0..ranks).flat_map(|rank| report(engine, now, rank, started())).collect()
            }
            PhaseName::Reattaching => {
                let phase = RankPhase::Training;
                let held = |rank| running(1, &[(rank, phase.clone())]);
                (0..2).flat_map(|number| attach(engine, now, number, 1, held(number))).collect()
            }
            PhaseName::Training | PhaseName::Paused | PhaseName::Draining | PhaseName::Ended => {
                break;
            }
            PhaseName::Gathering | PhaseName::Backoff | PhaseName::Detecting => tick(engine, now),
        };
        happened.extend(words(&actions));
    }
    happened.dedup();
    happened
}

/// The table's text for a request that `ask` makes.
fn cell(mut engine: Engine, ask: &dyn Fn(&mut Engine) -> Result<Vec<Action>, String>) -> String {
    let at_once = match ask(&mut engine) {
        Err(_) => return "refused".to_owned(),
        Ok(actions) => words(&actions),
    };
    let later = course(&mut engine);
    let text = |words: Vec<&str>| match words.is_empty() {
        true => "-".to_owned(),
        false => words.join(", "),
    };
    format!("{}; then {}", text(at_once), text(later))
}

fn table() -> String {
    let notice = |engine: &mut Engine| match engine.nodes.get(&node(0)) {
        Some(_) => Ok(depart(engine, at(10.0), 0, Some(60.0))),
        None => Err("the node's agent is not connected".to_owned()),
    };
    type Request<'a> = (&'a str, &'a dyn Fn(&mut Engine) -> Result<Vec<Action>, String>);
    let requests: [Request<'_>; 6] = [
        ("drain", &|engine| Ok(drain(engine, at(10.0)))),
        ("notice, too few nodes stay", &notice),
        ("notice, enough nodes stay", &|engine| {
            engine.policy.min_ranks = 1;
            notice(engine)
        }),
        ("pause", &|engine| {
            engine.can_pause()?;
            Ok(engine.drive(at(10.0), Event::Pause { reason: "lunch".to_owned() }))
        }),
        ("checkpoint", &|engine| {
            engine.can_checkpoint()?;
            Ok(engine.drive(at(10.0), Event::Checkpoint))
        }),
        ("stop", &|engine| Ok(engine.drive(at(10.0), Event::Stop))),
    ];
    let mut table = String::new();
    for (request, ask) in requests {
        for (phase, engine) in phases() {
            table += &format!("{request} while {phase}: {}\n", cell(engine, ask));
        }
    }
    table
}

#[test]
fn every_request_in_every_phase_is_carried_out_or_refused() {
    let (found, expected) = (table(), TABLE.lines());
    for (found, expected) in found.lines().zip(expected) {
        assert_eq!(found, expected);
    }
    assert_eq!(found.lines().count(), TABLE.lines().count());
}

#[test]
fn a_drain_that_reaches_no_rank_says_what_they_may_have() {
    let mut engine = training(&[1, 1]);
    report(&mut engine, at(8.0), 0, stepped(40));
    report(&mut engine, at(9.0), 0, RankReport::Saved(commit(1, 30)));
    for node in [0, 1] {
        detach(&mut engine, at(10.0), node);
    }
    while engine.status().phase != PhaseName::Gathering {
        let until = engine.deadline().unwrap();
        tick(&mut engine, until);
    }

    drain(&mut engine, at(60.0));

    let outcome = engine.outcome().unwrap().to_string();
    assert!(outcome.contains("has the state after step 40"), "{outcome}");
    assert!(outcome.contains("continues from the checkpoint of step 30"), "{outcome}");
}

#[test]
fn a_drain_while_the_nodes_are_too_few_saves_what_their_ranks_hold() {
    let mut engine = training(&[1, 1]);
    engine.policy.min_ranks = 2;
    detach(&mut engine, at(10.0), 1);
    let until = at(10.0).after(engine.policy.node_grace);
    tick(&mut engine, until);
    if engine.status().phase == PhaseName::Backoff {
        let until = engine.deadline().unwrap();
        tick(&mut engine, until);
    }
    assert_eq!(engine.status().phase, PhaseName::Gathering);

    drain(&mut engine, at(60.0));

    assert_eq!((engine.outcome(), placed(&engine)), (None, vec!["node0".to_owned()]));
}
