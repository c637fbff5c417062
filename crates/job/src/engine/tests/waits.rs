//! How long the engine waits: backoffs, quarantines, deadlines of drains.

use super::*;
use crate::engine::{
    nodes::{Node, Nodes},
    policy::Policy,
};

#[test]
fn jobs_that_failed_together_do_not_restart_together() {
    let policy = Policy::new(&spec(1));
    let backoff = |job, generation| {
        let job = JobId(uuid::Uuid::from_u64_pair(job, 0));
        policy.backoff(2, job, Generation(generation))
    };
    assert_ne!(backoff(0, 1), backoff(1, 1), "of two jobs");
    assert_ne!(backoff(0, 1), backoff(0, 2), "of two failures of a job");
    assert_eq!(backoff(0, 1), backoff(0, 1), "the same after a restart of the coordinator");
}

#[test]
fn backoffs_double_up_to_half_a_minute() {
    let policy = Policy::new(&spec(1));
    // Both numbers are zero, so nothing varies.
    let seconds = |failures| {
        policy.backoff(failures, JobId(uuid::Uuid::nil()), Generation(0)).as_secs_f64() / 0.75
    };
    let waits: Vec<f64> = (0..10).map(seconds).collect();
    assert_eq!(waits, [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0, 32.0]);
}

#[test]
fn each_further_quarantine_of_a_node_is_twice_as_long_up_to_16_minutes() {
    let mut nodes = Nodes::default();
    nodes.insert(node(0), Node::new(Attachment(1), at(0.0), 1));
    let mut seconds = Vec::new();
    for failures in 2..9 {
        nodes.get_mut(&node(0)).unwrap().failures = failures;
        nodes.quarantine(at(0.0), &node(0)).unwrap();
        seconds.push(nodes[&node(0)].quarantined_until.unwrap().since(at(0.0)).as_secs());
    }
    assert_eq!(seconds, [60, 120, 240, 480, 960, 960, 960]);
}
