//! Behaviour without a GPU. Each test checks something both with and without `libnccl.so`.

use super::ffi::Communicator;
use super::*;
use crate::tcp::TcpCollective;

const OPTIONS: NcclOptions = NcclOptions {
    order: SummationOrder::Library,
    connect_timeout: Duration::from_secs(30),
    operation_timeout: Duration::from_secs(30),
    abort_timeout: Duration::from_secs(5),
};

fn alone() -> Box<dyn Collective> {
    Box::new(TcpCollective::alone(OPTIONS.operation_timeout).unwrap())
}

fn assert_missing<T>(result: Result<T, Error>) {
    let Err(error) = result else { panic!("a missing library must be an error") };
    assert!(matches!(error, Error::LibraryMissing { library: "libnccl.so", .. }), "{error}");
    assert!(error.to_string().contains("`pip install torch==2.11.0`"), "{error}");
}

#[test]
fn the_library_answers_or_is_reported_as_missing() {
    if !is_present() {
        assert_missing(version());
        assert_missing(ffi::unique_id());
        return;
    }
    assert!(version().unwrap() >= MIN_VERSION);
    assert_ne!(ffi::unique_id().unwrap(), ffi::unique_id().unwrap());
}

#[test]
fn a_communicator_without_a_gpu_is_a_typed_error() {
    if !is_present() {
        return assert_missing(Communicator::begin([0; 128], Rank(0), 1));
    }
    // No machine has this device; whether the driver or the device is missing depends on the machine.
    let refused = NcclCollective::connect(alone(), Machines::one(1), 4096, OPTIONS).unwrap_err();
    assert!(matches!(refused, Error::LibraryMissing { .. } | Error::Gpu(_)), "{refused}");

    let communicator = Communicator::begin(ffi::unique_id().unwrap(), Rank(0), 1);
    let result = communicator.and_then(|communicator| {
        let deadline = Instant::now() + OPTIONS.connect_timeout;
        while !communicator.is_ready()? {
            assert!(Instant::now() < deadline, "neither set up nor failed");
            std::thread::yield_now();
        }
        communicator.abort();
        Ok(())
    });
    match result {
        Ok(()) => assert!(Device::open(0).is_ok(), "set up on no device"),
        Err(error) => assert!(matches!(error, Error::Nccl { .. }), "{error}"),
    }
}

#[test]
fn connecting_without_the_library_reports_how_to_install_it() {
    if !is_present() {
        return assert_missing(NcclCollective::connect(alone(), Machines::one(1), 0, OPTIONS));
    }
    match NcclCollective::connect(alone(), Machines::one(1), 0, OPTIONS) {
        Ok(mut group) => assert_eq!(group.all_gather_bytes(b"me").unwrap(), [b"me"]),
        Err(error) => assert!(Device::open(0).is_err(), "{error}"),
    }
}

/// A group without a communicator; enough for errors that are detected before NCCL is called.
fn unconnected() -> NcclCollective {
    let bootstrap = alone();
    let abort = bootstrap.abort_handle();
    NcclCollective { bootstrap, device: 0, options: OPTIONS, abort, link: None }
}

#[test]
fn host_memory_is_refused_with_a_remedy() {
    let refused = unconnected().broadcast(Rank(0), BufferMut::Host(&mut [1.0])).unwrap_err();
    assert!(refused.to_string().contains("set cluster.collective = \"tcp\""), "{refused}");
}

#[test]
fn a_rank_without_partial_sums_is_refused() {
    let refused = unconnected().all_reduce(8, &mut []).unwrap_err();
    assert!(refused.to_string().contains("no partial sum"), "{refused}");
}

#[test]
#[allow(unsafe_code)]
fn memory_of_another_device_is_refused() {
    // SAFETY: it has no values.
    let elsewhere = unsafe { DeviceSliceMut::from_raw(0, 0, 3) };
    let refused = unconnected().broadcast(Rank(0), BufferMut::Device(elsewhere)).unwrap_err();
    assert_eq!(refused.to_string(), "broadcast: the buffer is on CUDA device 3, the group on 0");
}
