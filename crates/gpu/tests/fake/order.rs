//! The fake itself: it does everything in orders that CUDA allows, and never in one that CUDA forbids.

use std::cell::Cell;

use baton_fake_gpu::{for_seeds, run};
use baton_gpu::{Device, DeviceMemory, Stream, StreamEvent, copy_in, copy_out};

use crate::Torch;

/// Bytes that libtorch's stream reads while another stream writes them, with or without waiting for the write.
fn read_what_another_stream_writes(wait: bool) -> [u8; 100] {
    let torch = Torch::new();
    let other = Stream::new(torch.device).unwrap();
    let memory = torch.memory(100);
    let written = StreamEvent::new(torch.device).unwrap();
    let (new, mut read) = ([7; 100], [0; 100]);
    // SAFETY: both copies are done when this function returns. Without the wait, the test breaks the rule not to read
    // memory that is being written; the fake tolerates that.
    unsafe { copy_in(&other, memory.address(), &new) }.unwrap();
    other.mark(&written).unwrap();
    if wait {
        torch.stream.wait_for(&written).unwrap();
    }
    // SAFETY: as above.
    unsafe { copy_out(&torch.stream, &mut read, memory.address()) }.unwrap();
    torch.mark().wait().unwrap();
    written.wait().unwrap();
    read
}

#[test]
fn a_missing_wait_shows_as_wrong_values_completely_and_partly() {
    let (whole, parts) = (Cell::new(0), Cell::new(0));
    for_seeds(
        "order::a_missing_wait_shows_as_wrong_values_completely_and_partly",
        200,
        |_, seed| {
            let wrong = read_what_another_stream_writes(false).iter().filter(|b| **b != 7).count();
            match wrong {
                0 => {}
                100 => whole.set(whole.get() + 1),
                _ => parts.set(parts.get() + 1),
            }
            assert!(seed < 199 || whole.get() > 20 && parts.get() > 0, "{whole:?}, {parts:?}");
        },
    );
}

#[test]
fn with_a_wait_the_written_values_are_read() {
    for_seeds("order::with_a_wait_the_written_values_are_read", 200, |_, _| {
        assert_eq!(read_what_another_stream_writes(true), [7; 100]);
    });
}

#[test]
fn no_work_is_done_before_a_query_and_waits_of_the_host_are_counted() {
    let name = "order::no_work_is_done_before_a_query_and_waits_of_the_host_are_counted";
    run(name, |gpu| {
        let mut torch = Torch::new();
        let memory = torch.memory(4);
        torch.write(memory.address(), &[1, 2, 3, 4]);
        let mut read = [0; 4];
        // SAFETY: waited for below.
        unsafe { copy_out(&torch.stream, &mut read, memory.address()) }.unwrap();
        let done = torch.mark();
        assert_eq!(read, [0; 4]);

        done.wait().unwrap();
        assert_eq!((read, gpu.host_waits()), ([1, 2, 3, 4], 1));
        done.wait().unwrap();
        assert_eq!(gpu.host_waits(), 1);

        let done = torch.mark();
        while !done.is_reached().unwrap() {}
        assert_eq!(gpu.host_waits(), 1);
    });
}

#[test]
fn a_wait_is_for_the_newest_mark_at_its_time_and_an_event_without_one_counts_as_reached() {
    let name = "order::a_wait_is_for_the_newest_mark_at_its_time_and_an_event_without_one_counts_as_reached";
    for_seeds(name, 50, |_, _| {
        let torch = Torch::new();
        let other = Stream::new(torch.device).unwrap();
        let event = StreamEvent::new(torch.device).unwrap();
        assert!(event.is_reached().unwrap());
        torch.stream.wait_for(&event).unwrap();
        other.mark(&event).unwrap();
        other.wait_for(&event).unwrap();
        torch.stream.mark(&event).unwrap();
        event.wait().unwrap();
        let done = StreamEvent::new(torch.device).unwrap();
        other.mark(&done).unwrap();
        done.wait().unwrap();
    });
}

#[test]
fn memory_that_is_not_the_devices_is_refused() {
    run("order::memory_that_is_not_the_devices_is_refused", |_| {
        let (one, other) = (Device::open(0).unwrap(), Device::open(1).unwrap());
        let memory = DeviceMemory::new(other, 8).unwrap();
        let stream = Stream::of_torch(one);
        for (address, len) in [(memory.address(), 8), (0x1000, 1)] {
            // SAFETY: the fake rejects the copy.
            let refused = unsafe { copy_in(&stream, address, &vec![0; len]) }.unwrap_err();
            assert!(refused.to_string().contains("CUDA_ERROR_INVALID_VALUE"), "{refused}");
        }
        assert!(Device::open(16).unwrap_err().to_string().contains("CUDA_ERROR_INVALID_DEVICE"));
    });
}
