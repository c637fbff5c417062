//! Processes are killed while they save: every checkpoint reported as committed must be found undamaged.

use std::{
    env,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use baton_checkpoint::Store;

use crate::kit::{assert_holds, find_by, id, keep, newest, saved};

/// Store and generation for the process that is killed.
const STORE: &str = "BATON_TEST_VICTIM_STORE";
const GENERATION: &str = "BATON_TEST_VICTIM_GENERATION";
/// Number of kills; `make chaos` sets 500.
const CYCLES: &str = "BATON_TEST_KILLS";
const SEED: &str = "BATON_TEST_SEED";

/// Saves and prunes until it is killed, and prints each step once it is committed.
#[test]
#[ignore = "the process that the test below kills"]
fn victim() {
    let store = Store::open(&env::var(STORE).unwrap()).unwrap();
    let generation = env::var(GENERATION).unwrap().parse().unwrap();
    store.raise_fence(baton_job::Generation(generation)).unwrap();
    let resumed = find_by(&store, &Default::default()).unwrap();
    let start = resumed.map_or(0, |found| found.manifest.step.0);
    for step in start + 1.. {
        saved(&store, id(generation, step), 2);
        println!("committed {step}");
        let pruned = store.prune(&keep(2, false, 0, generation));
        assert_eq!(pruned.warnings, Vec::<String>::new());
    }
}

#[test]
fn reported_checkpoints_survive_a_kill_at_any_moment() {
    let folder = tempfile::tempdir().unwrap();
    let location = folder.path().to_str().unwrap();
    let cycles: u64 = env::var(CYCLES).map_or(20, |cycles| cycles.parse().unwrap());
    let seed = env::var(SEED).map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    println!("{SEED}={seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut reported = 0;
    for generation in 1..=cycles {
        let mut victim = Command::new(env::current_exe().unwrap())
            .args(["--ignored", "--exact", "kills::victim", "--nocapture"])
            .envs([(STORE, location), (GENERATION, &generation.to_string())])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines().map(Result::unwrap);
        let step_of = |line: String| line.strip_prefix("committed ")?.parse::<u64>().ok();
        for _ in 0..rng.u32(1..4) {
            reported = lines.by_ref().find_map(step_of).expect("it runs until it is killed");
        }
        // A random moment of the next save, or of the pruning.
        thread::sleep(Duration::from_micros(rng.u64(0..20_000)));
        victim.kill().unwrap();
        reported = lines.filter_map(step_of).max().unwrap_or(reported);
        victim.wait().unwrap();

        let store = Store::open(location).unwrap();
        let found = newest(&store);
        assert!(found.manifest.step.0 >= reported, "kill {generation}: step {reported} is lost");
        assert_eq!(found.skipped, Vec::<String>::new(), "kill {generation}");
        assert_holds(&store, &found.manifest);
        reported = found.manifest.step.0;
    }
}
