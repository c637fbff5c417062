//! The fake itself: it does what CUDA allows and nobody wants, and never what CUDA rules out.

use std::cell::Cell;

use baton_fake_gpu::{for_seeds, run};
use baton_gpu::{Device, DeviceMemory, Event, Stream, copy_in, copy_out};

use crate::Torch;

/// What libtorch's stream reads of what another stream writes, which it waits for or not.
fn read_what_another_stream_writes(wait: bool) -> [u8; 100] {
    let torch = Torch::new();
    let other = Stream::new(torch.device).unwrap();
    let memory = torch.memory(100);
    let written = Event::new(torch.device).unwrap();
    let (news, mut read) = ([7; 100], [0; 100]);
    // SAFETY: both copies are over when this function ends. Who does not wait breaks the promise not to read
    // what is being written; the fake puts up with it.
    unsafe { copy_in(&other, memory.address(), &news) }.unwrap();
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
fn a_forgotten_wait_shows_as_wrong_values_whole_and_in_part() {
    let (whole, parts) = (Cell::new(0), Cell::new(0));
    for_seeds("order::a_forgotten_wait_shows_as_wrong_values_whole_and_in_part", 200, |_, seed| {
        let wrong = read_what_another_stream_writes(false).iter().filter(|b| **b != 7).count();
        match wrong {
            0 => {}
            100 => whole.set(whole.get() + 1),
            _ => parts.set(parts.get() + 1),
        }
        assert!(seed < 199 || whole.get() > 20 && parts.get() > 0, "{whole:?}, {parts:?}");
    });
}

#[test]
fn who_waits_reads_what_was_written() {
    for_seeds("order::who_waits_reads_what_was_written", 200, |_, _| {
        assert_eq!(read_what_another_stream_writes(true), [7; 100]);
    });
}

#[test]
fn nothing_is_done_before_somebody_asks_and_hosts_that_wait_are_counted() {
    let name = "order::nothing_is_done_before_somebody_asks_and_hosts_that_wait_are_counted";
    run(name, |gpu| {
        let mut torch = Torch::new();
        let memory = torch.memory(4);
        torch.write(memory.address(), &[1, 2, 3, 4]);
        let mut read = [0; 4];
        // SAFETY: waited for below.
        unsafe { copy_out(&torch.stream, &mut read, memory.address()) }.unwrap();
        let over = torch.mark();
        assert_eq!(read, [0; 4]);

        over.wait().unwrap();
        assert_eq!((read, gpu.host_waits()), ([1, 2, 3, 4], 1));
        over.wait().unwrap();
        assert_eq!(gpu.host_waits(), 1);

        let over = torch.mark();
        while !over.is_reached().unwrap() {}
        assert_eq!(gpu.host_waits(), 1);
    });
}

#[test]
fn a_wait_is_for_the_newest_mark_at_its_time_and_an_event_without_one_counts_as_reached() {
    let name = "order::a_wait_is_for_the_newest_mark_at_its_time_and_an_event_without_one_counts_as_reached";
    for_seeds(name, 50, |_, _| {
        let torch = Torch::new();
        let other = Stream::new(torch.device).unwrap();
        let event = Event::new(torch.device).unwrap();
        assert!(event.is_reached().unwrap());
        torch.stream.wait_for(&event).unwrap();
        other.mark(&event).unwrap();
        other.wait_for(&event).unwrap();
        torch.stream.mark(&event).unwrap();
        event.wait().unwrap();
        let over = Event::new(torch.device).unwrap();
        other.mark(&over).unwrap();
        over.wait().unwrap();
    });
}

#[test]
fn memory_that_is_not_the_devices_is_refused() {
    run("order::memory_that_is_not_the_devices_is_refused", |_| {
        let (one, other) = (Device::open(0).unwrap(), Device::open(1).unwrap());
        let memory = DeviceMemory::new(other, 8).unwrap();
        let stream = Stream::of_torch(one);
        for (address, len) in [(memory.address(), 8), (0x1000, 1)] {
            // SAFETY: it is refused.
            let refused = unsafe { copy_in(&stream, address, &vec![0; len]) }.unwrap_err();
            assert!(refused.to_string().contains("CUDA_ERROR_INVALID_VALUE"), "{refused}");
        }
        assert!(Device::open(16).unwrap_err().to_string().contains("CUDA_ERROR_INVALID_DEVICE"));
    });
}
