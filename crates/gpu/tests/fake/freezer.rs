//! [`Freezer`]: a copy of the state that later changes do not affect.

use baton_fake_gpu::for_seeds;
use baton_gpu::Freezer;

use crate::{Torch, random_bytes};

#[test]
fn a_frozen_copy_does_not_change_with_the_state() {
    let name = "freezer::a_frozen_copy_does_not_change_with_the_state";
    for_seeds(name, 200, |gpu, seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut torch = Torch::new();
        let mut freezer = Freezer::new(torch.device).unwrap();
        let len = random.usize(1..5000);
        let state = torch.memory(len);
        for _ in 0..5 {
            let old = random_bytes(&mut random, len);
            torch.write(state.address(), &old);
            let waits = gpu.host_waits();
            // SAFETY: only libtorch's stream writes to the state.
            unsafe { freezer.freeze(state.address(), len) }.unwrap();
            assert_eq!(gpu.host_waits(), waits, "freezing must not wait");
            torch.write(state.address(), &random_bytes(&mut random, len));

            let mut thawed = vec![0; len];
            freezer.thaw(&mut thawed).unwrap();
            assert_eq!(thawed, old);
        }
    });
}

#[test]
fn of_two_frozen_states_the_second_is_thawed_and_only_the_requested_part() {
    let name = "freezer::of_two_frozen_states_the_second_is_thawed_and_only_the_requested_part";
    for_seeds(name, 200, |_, seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut torch = Torch::new();
        let mut freezer = Freezer::new(torch.device).unwrap();
        let state = torch.memory(1000);
        let mut frozen = Vec::new();
        // A change of the length needs new memory.
        for len in [1000, 1000, 700, 1000] {
            frozen = random_bytes(&mut random, len);
            torch.write(state.address(), &frozen);
            // SAFETY: only libtorch's stream writes to the state.
            unsafe { freezer.freeze(state.address(), len) }.unwrap();
        }
        torch.write(state.address(), &[0; 1000]);
        let mut thawed = vec![0; 600];
        freezer.thaw(&mut thawed).unwrap();
        assert_eq!(thawed, frozen[..600]);
        // It can be read again.
        let mut thawed = vec![0; 1000];
        freezer.thaw(&mut thawed).unwrap();
        assert_eq!(thawed, frozen);
    });
}

#[test]
fn a_state_of_several_chunks_is_thawed_completely() {
    for_seeds("freezer::a_state_of_several_chunks_is_thawed_completely", 3, |_, seed| {
        let mut torch = Torch::new();
        let mut freezer = Freezer::new(torch.device).unwrap();
        let len = (50 << 20) + 13;
        let old: Vec<u8> = (0..len as u64).map(|at| ((at + seed) % 251) as u8).collect();
        let state = torch.memory(len);
        torch.write(state.address(), &old);
        // SAFETY: only libtorch's stream writes to the state.
        unsafe { freezer.freeze(state.address(), len) }.unwrap();
        torch.write(state.address(), &vec![0; len]);
        let mut thawed = vec![0; len];
        freezer.thaw(&mut thawed).unwrap();
        assert!(thawed == old);
    });
}
