//! [`Readback`]: numbers as they were when the copy was started.

use baton_fake_gpu::for_seeds;
use baton_gpu::Readback;

use crate::Torch;

#[test]
fn values_are_those_of_the_last_start() {
    let name = "readback::values_are_those_of_the_last_start";
    for_seeds(name, 200, |gpu, seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut torch = Torch::new();
        let numbers = torch.memory(12);
        let mut readback = Readback::<3>::new(torch.device).unwrap();
        assert_eq!(readback.values().unwrap(), [0.0; 3]);
        for _ in 0..10 {
            let waits = gpu.host_waits();
            let mut newest = [0.0; 3];
            for _ in 0..random.usize(1..3) {
                newest = [(); 3].map(|()| random.f32());
                torch.write(numbers.address(), &newest.map(f32::to_ne_bytes).concat());
                // SAFETY: only libtorch's stream writes to the numbers.
                unsafe { readback.start(numbers.address()) }.unwrap();
                torch.write(numbers.address(), &[0xff; 12]);
            }
            assert_eq!(gpu.host_waits(), waits, "starting a readback must not wait");
            assert_eq!(readback.values().unwrap(), newest);
        }
    });
}
