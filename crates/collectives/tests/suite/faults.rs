//! Tests of failures that every implementation must pass: an operation ends soon and its error names the reason.

use std::sync::Mutex;
use std::time::Duration;

use baton_collectives::{BufferMut, Error, Part, TreeNode};
use baton_job::Rank;

use crate::{IMPLEMENTATIONS, Implementation, LONG, Member, on_every_rank};

/// An all-reduce with as many virtual ranks as ranks.
fn all_reduce(member: &mut Member, len: usize) -> Result<(), Error> {
    let mut values = vec![1.0; len];
    let node = TreeNode::leaf(member.rank().0);
    let buffer = BufferMut::Host(&mut values);
    member.all_reduce(member.world_size(), &mut [Part { node, buffer }])
}

#[test]
fn a_peer_that_leaves_is_named_and_no_rank_waits_for_the_deadline() {
    for implementation in IMPLEMENTATIONS {
        let mut group = implementation.group(4, LONG);
        let leaver = Mutex::new(group.pop());
        let errors = on_every_rank(&mut group, |rank, member| {
            if rank == Rank(0) {
                drop(leaver.lock().unwrap().take());
            }
            all_reduce(member, 3 << 20).unwrap_err()
        });
        // Rank 0 exchanges nothing with rank 3 there, and loses the one that does and leaves because of it.
        let left = match implementation {
            Implementation::Tcp([2, 2, ..]) | Implementation::SharedMemory([2, 2, ..]) => [2, 3, 3],
            _ => [3; 3],
        };
        for (error, left) in errors.into_iter().zip(left) {
            let Error::LostPeer { rank, operation: "all_reduce", .. } = error else {
                panic!("{implementation:?}: {error}");
            };
            let is_named = rank == Rank(left);
            // Where there are more machines, some lose one that lost one.
            let is_certain = implementation.is_flat(4) || left == 2;
            assert!(is_named || !is_certain, "{implementation:?}: {rank}");
        }
    }
}

#[test]
fn an_abort_from_another_thread_ends_the_operation_and_all_later_ones() {
    for implementation in IMPLEMENTATIONS {
        let mut group = implementation.group(2, LONG);
        let abort = group[0].abort_handle();
        let member = &mut group[0];
        let result = std::thread::scope(|scope| {
            let operation = scope.spawn(|| all_reduce(member, 10));
            abort.abort();
            operation.join().unwrap()
        });
        assert!(matches!(result, Err(Error::Aborted { operation: "all_reduce" })), "{result:?}");
        let later = group[0].all_gather_bytes(&[]);
        assert!(matches!(later, Err(Error::Aborted { .. })), "{later:?}");
    }
}

#[test]
fn the_deadline_names_a_rank_that_is_missing() {
    let short = Duration::from_millis(30);
    for implementation in IMPLEMENTATIONS {
        let mut group = implementation.group(4, short);
        let errors =
            on_every_rank(&mut group[..3], |_, member| all_reduce(member, 10).unwrap_err());
        assert!(errors.iter().any(|error| matches!(error, Error::TimedOut { .. })), "{errors:?}");
        for error in errors {
            let text = error.to_string();
            let late = text.starts_with("all_reduce: timed out after 30ms, waiting for rank");
            match implementation.is_flat(4) {
                true => assert!(late && text.ends_with('3'), "{text}"),
                // The rank that it waits for may have left at that deadline.
                false => assert!(late || matches!(error, Error::LostPeer { .. }), "{text}"),
            }
        }
        let later = all_reduce(&mut group[0], 10).unwrap_err();
        assert!(matches!(later, Error::Broken { operation: "all_reduce" }), "{later}");
    }
}

#[test]
fn ranks_that_do_different_things_get_an_error() {
    for implementation in IMPLEMENTATIONS {
        let mut group = implementation.group(2, LONG);
        let results = on_every_rank(&mut group, |rank, member| {
            let mut values = [0.0; 10];
            match rank {
                // May succeed: a root need not wait for the others.
                Rank(0) => member.broadcast(Rank(0), BufferMut::Host(&mut values)),
                _ => all_reduce(member, 10),
            }
        });
        assert!(matches!(results[1], Err(Error::Protocol { .. })), "{results:?}");
    }
}

#[test]
fn lengths_that_differ_between_ranks_are_an_error() {
    for implementation in IMPLEMENTATIONS {
        let group = implementation.group(2, LONG);
        let errors = on_every_rank(group, |rank, mut member| {
            all_reduce(&mut member, 10 + 2 * rank.0 as usize).unwrap_err()
        });
        assert!(errors.iter().any(|error| matches!(error, Error::Protocol { .. })), "{errors:?}");
    }
}

#[test]
fn a_root_outside_the_group_is_refused() {
    for implementation in IMPLEMENTATIONS {
        let refused = implementation.group(1, LONG)[0].broadcast(Rank(1), BufferMut::Host(&mut []));
        let text = refused.unwrap_err().to_string();
        assert_eq!(text, "broadcast: root is rank 1, but there are 1 ranks");
    }
}
