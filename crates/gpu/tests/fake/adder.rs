//! [`Adder`]: the order of its sums in their stream. The fake does not compile its PTX.

use baton_fake_gpu::for_seeds;
use baton_gpu::Adder;

use crate::Torch;

#[test]
fn sums_are_bit_identical_to_the_hosts() {
    for_seeds("adder::sums_are_bit_identical_to_the_hosts", 50, |_, seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut torch = Torch::new();
        let adder = Adder::new(torch.device).unwrap();
        let len = random.usize(0..2000);
        // Random bits, except NaNs and infinities.
        let mut value = || Some(f32::from_bits(random.u32(..))).filter(|v| v.is_finite());
        let mut values = || (0..len).map(|_| value().unwrap_or(0.5)).collect::<Vec<f32>>();
        let (left, right) = (values(), values());
        let bytes =
            |values: &[f32]| values.iter().flat_map(|v| v.to_ne_bytes()).collect::<Vec<u8>>();
        let memory = [&left, &right].map(|values| {
            let memory = torch.memory(4 * len);
            torch.write(memory.address(), &bytes(values));
            memory
        });
        // SAFETY: both ranges have this length and do not overlap.
        unsafe { adder.add(&torch.stream, memory[0].address(), memory[1].address(), len) }.unwrap();
        let sums: Vec<f32> = left.iter().zip(&right).map(|(left, right)| left + right).collect();
        assert_eq!(torch.read(memory[0].address(), 4 * len), bytes(&sums));
        assert_eq!(torch.read(memory[1].address(), 4 * len), bytes(&right));
    });
}
