//! [`DeviceSnapshot`]: a copy of the state that later changes do not affect.

use baton_fake_gpu::for_seeds;
use baton_gpu::DeviceSnapshot;

use crate::{Torch, random_bytes};

#[test]
fn a_captured_copy_does_not_change_with_the_state() {
    let name = "device_snapshot::a_captured_copy_does_not_change_with_the_state";
    for_seeds(name, 200, |gpu, seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut torch = Torch::new();
        let mut snapshot = DeviceSnapshot::new(torch.device).unwrap();
        let len = random.usize(1..5000);
        let state = torch.memory(len);
        for _ in 0..5 {
            let old = random_bytes(&mut random, len);
            torch.write(state.address(), &old);
            let waits = gpu.host_waits();
            // SAFETY: only libtorch's stream writes to the state.
            unsafe { snapshot.capture(state.address(), len) }.unwrap();
            assert_eq!(gpu.host_waits(), waits, "a capture must not wait");
            torch.write(state.address(), &random_bytes(&mut random, len));

            let mut read = vec![0; len];
            snapshot.read(&mut read).unwrap();
            assert_eq!(read, old);
        }
    });
}

#[test]
fn of_two_captured_states_the_second_is_read_and_only_the_requested_part() {
    let name =
        "device_snapshot::of_two_captured_states_the_second_is_read_and_only_the_requested_part";
    for_seeds(name, 200, |_, seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut torch = Torch::new();
        let mut snapshot = DeviceSnapshot::new(torch.device).unwrap();
        let state = torch.memory(1000);
        let mut captured = Vec::new();
        // A change of the length needs new memory.
        for len in [1000, 1000, 700, 1000] {
            captured = random_bytes(&mut random, len);
            torch.write(state.address(), &captured);
            // SAFETY: only libtorch's stream writes to the state.
            unsafe { snapshot.capture(state.address(), len) }.unwrap();
        }
        torch.write(state.address(), &[0; 1000]);
        let mut read = vec![0; 600];
        snapshot.read(&mut read).unwrap();
        assert_eq!(read, captured[..600]);
        // It can be read again.
        let mut read = vec![0; 1000];
        snapshot.read(&mut read).unwrap();
        assert_eq!(read, captured);
    });
}

#[test]
fn a_state_of_several_chunks_is_read_completely() {
    for_seeds("device_snapshot::a_state_of_several_chunks_is_read_completely", 3, |_, seed| {
        let mut torch = Torch::new();
        let mut snapshot = DeviceSnapshot::new(torch.device).unwrap();
        let len = (50 << 20) + 13;
        let old: Vec<u8> = (0..len as u64).map(|at| ((at + seed) % 251) as u8).collect();
        let state = torch.memory(len);
        torch.write(state.address(), &old);
        // SAFETY: only libtorch's stream writes to the state.
        unsafe { snapshot.capture(state.address(), len) }.unwrap();
        torch.write(state.address(), &vec![0; len]);
        let mut read = vec![0; len];
        snapshot.read(&mut read).unwrap();
        assert!(read == old);
    });
}
