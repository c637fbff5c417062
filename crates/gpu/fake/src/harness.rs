//! Runs a test in a process that loads this library instead of NVIDIA's.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use std::env;
use std::ffi::{CStr, c_char};
use std::os::unix::fs::symlink;
use std::process::Command;

use crate::machine;

/// Variable with the folder of links to this library, set in the test's child process.
const FOLDER: &str = "BATON_FAKE_GPU_FOLDER";
/// Variable with the only seed to run, to repeat a failure.
const SEED: &str = "BATON_FAKE_GPU_SEED";
/// File that a test writes to that folder when it has finished.
const DONE: &str = "done";

/// Number of times that a host has waited until a device had done its work.
#[unsafe(no_mangle)]
extern "C" fn baton_fake_gpu_host_waits() -> u64 {
    machine::with(|machine| machine.host_waits)
}

/// Sets the seed of the order in which work is done.
#[unsafe(no_mangle)]
extern "C" fn baton_fake_gpu_seed(seed: u64) {
    machine::with(|machine| machine.random.0 = seed);
}

/// Makes every later abort of a communicator hang, as can happen when a peer is lost.
#[unsafe(no_mangle)]
extern "C" fn baton_fake_gpu_hang_aborts() {
    machine::with(|machine| machine.aborts_hang = true);
}

/// Access to the fake library for tests in its process.
///
/// The program that links this crate contains it twice: once as its own code, with a machine that is never used, and
/// once as the shared library that replaces the driver.
#[derive(Debug)]
pub struct FakeGpu {
    library: libloading::Library,
}

impl FakeGpu {
    /// Number of times that a host has waited until a device had done its work.
    #[must_use]
    pub fn host_waits(&self) -> u64 {
        // SAFETY: the function is above.
        unsafe {
            self.library.get::<extern "C" fn() -> u64>(b"baton_fake_gpu_host_waits").unwrap()()
        }
    }

    /// Makes every later abort of a communicator hang, as can happen when a peer is lost.
    pub fn hang_aborts(&self) {
        // SAFETY: the function is above.
        unsafe { self.library.get::<extern "C" fn()>(b"baton_fake_gpu_hang_aborts").unwrap()() }
    }

    /// Ranges of NVTX that have ended, each with the ranges of its thread around it: `outer/inner`.
    #[must_use]
    pub fn ended_ranges(&self) -> Vec<String> {
        // SAFETY: the function is in `nvtx`.
        let text = unsafe {
            let ended = self
                .library
                .get::<extern "C" fn() -> *const c_char>(b"baton_fake_gpu_ended_ranges")
                .unwrap()();
            CStr::from_ptr(ended)
        };
        text.to_string_lossy().lines().map(str::to_owned).collect()
    }

    fn seed(&self, seed: u64) {
        // SAFETY: the function is above.
        unsafe { self.library.get::<extern "C" fn(u64)>(b"baton_fake_gpu_seed").unwrap()(seed) }
    }
}

/// Runs `body` in a separate process that loads the fake instead of NVIDIA's libraries. `test` is the full name of the
/// calling test; the process runs only that test.
///
/// # Panics
/// If the body panics.
pub fn run(test: &str, body: impl FnOnce(&FakeGpu)) {
    if let Some(folder) = env::var_os(FOLDER) {
        let folder = std::path::PathBuf::from(folder);
        // SAFETY: its initialisers do nothing.
        let library = unsafe { libloading::Library::new(folder.join("libcuda.so")) }.unwrap();
        body(&FakeGpu { library });
        std::fs::write(folder.join(DONE), "").unwrap();
        return;
    }
    let program = env::current_exe().unwrap();
    // Cargo puts the library of a dependency into the folder of the tests.
    let fake = program.with_file_name("libbaton_fake_gpu.so");
    assert!(fake.exists(), "{} was not built", fake.display());
    let folder = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libcuda.so.1", "libnccl.so", "libnvtx3interop.so.1"] {
        symlink(&fake, folder.path().join(name)).unwrap();
    }
    let output = Command::new(program)
        .args([test, "--exact", "--include-ignored", "--nocapture"])
        .env(FOLDER, folder.path())
        .env("LD_LIBRARY_PATH", folder.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "with fake GPUs, {test} ended with {}:\n{text}",
        output.status
    );
    assert!(folder.path().join(DONE).exists(), "there is no test with the name {test}");
}

/// [`run`]s `body` with each seed below `seeds`, or with the one that `BATON_FAKE_GPU_SEED` names. With several threads
/// a seed does not fully determine the order.
///
/// # Panics
/// If the body panics; the seed is printed.
pub fn for_seeds(test: &str, seeds: u64, body: impl Fn(&FakeGpu, u64)) {
    let chosen = env::var(SEED).ok().map(|seed| seed.parse().expect("a number"));
    let seeds = chosen.map_or(0..seeds, |seed| seed..seed + 1);
    run(test, |gpu| {
        for seed in seeds {
            let printer = SeedPrinter(seed);
            gpu.seed(seed);
            body(gpu, seed);
            drop(printer);
        }
    });
}

/// Prints the seed if the body panics.
struct SeedPrinter(u64);

impl Drop for SeedPrinter {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("repeat with {SEED}={}", self.0);
        }
    }
}
