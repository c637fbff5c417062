//! [`Uploads`]: inputs are copied while the device computes, and arrive unchanged.

use std::collections::VecDeque;

use baton_fake_gpu::{FakeGpu, for_seeds};
use baton_gpu::{DeviceMemory, StreamEvent, Uploads};

use crate::{Torch, random_bytes};

/// Number of uploads in flight in addition to the one that is computed on.
const AHEAD: usize = 2;

type Batch = Vec<Vec<u8>>;

/// Sends `batches` as a training loop does, with a device that is at most one step behind or as far as it may be. The
/// data that libtorch read must be the data that was sent.
fn train(batches: &[Batch], is_device_close: bool) {
    let torch = Torch::new();
    let mut uploads = Uploads::new(torch.device).unwrap();
    let mut in_flight = VecDeque::new();
    let mut read: Vec<Vec<DeviceMemory>> = Vec::new();
    let mut step_before: Option<StreamEvent> = None;
    let mut to_send = batches.iter();
    let send = |uploads: &mut Uploads, batch: &Batch| {
        let parts: Vec<&[u8]> = batch.iter().map(Vec::as_slice).collect();
        uploads.send(&parts).unwrap()
    };
    in_flight.extend(to_send.by_ref().take(AHEAD).map(|batch| send(&mut uploads, batch)));
    for batch in batches {
        in_flight.extend(to_send.next().map(|batch| send(&mut uploads, batch)));
        let ticket = in_flight.pop_front().unwrap();
        let mut address = uploads.receive(&ticket).unwrap();
        let mut copies = Vec::new();
        for part in batch {
            let copy = torch.memory(part.len());
            torch.copy(copy.address(), address, part.len());
            address += part.len().next_multiple_of(256) as u64;
            copies.push(copy);
        }
        read.push(copies);
        uploads.release(ticket).unwrap();
        let step = torch.mark();
        if let Some(before) = step_before.replace(step).filter(|_| is_device_close) {
            while !before.is_reached().unwrap() {}
        }
    }
    for (batch, copies) in batches.iter().zip(&read) {
        for (part, copy) in batch.iter().zip(copies) {
            assert_eq!(&torch.read(copy.address(), part.len()), part);
        }
    }
}

fn batch(random: &mut fastrand::Rng, max_len: usize) -> Batch {
    (0..3)
        .map(|_| {
            let len = random.usize(0..=max_len);
            random_bytes(random, len)
        })
        .collect()
}

#[test]
fn inputs_of_any_size_arrive_unchanged() {
    for_seeds("uploads::inputs_of_any_size_arrive_unchanged", 200, |_, seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        // In some runs the batches grow, so that buffers must grow.
        let max_len = |number: usize| if seed % 3 == 0 { 100 + 200 * number } else { 1500 };
        let batches: Vec<Batch> =
            (0..12).map(|number| batch(&mut random, max_len(number))).collect();
        train(&batches, seed % 2 == 0);
    });
}

#[test]
fn the_host_does_not_wait_once_there_are_enough_buffers() {
    let name = "uploads::the_host_does_not_wait_once_there_are_enough_buffers";
    for_seeds(name, 200, |gpu: &FakeGpu, seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let torch = Torch::new();
        let mut uploads = Uploads::new(torch.device).unwrap();
        let mut in_flight = VecDeque::new();
        let mut step_before: Option<StreamEvent> = None;
        let waits = gpu.host_waits();
        let mut addresses = Vec::new();
        for number in 0..40 {
            // The first batches are the largest.
            let len = if number < 8 { 1000 } else { random.usize(1..=1000) };
            in_flight.push_back(uploads.send(&[&random_bytes(&mut random, len)]).unwrap());
            if in_flight.len() <= AHEAD {
                continue;
            }
            let ticket = in_flight.pop_front().unwrap();
            addresses.push(uploads.receive(&ticket).unwrap());
            uploads.release(ticket).unwrap();
            let step = torch.mark();
            if let Some(before) = step_before.replace(step) {
                while !before.is_reached().unwrap() {}
            }
        }
        assert_eq!(gpu.host_waits(), waits);
        addresses.sort_unstable();
        addresses.dedup();
        assert!(addresses.len() <= AHEAD + 3, "{} buffers", addresses.len());
    });
}
