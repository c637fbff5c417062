//! Running a test in a process that finds this library in place of NVIDIA's.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use std::env;
use std::os::unix::fs::symlink;
use std::process::Command;

use crate::world;

/// Names the folder of the links to this library, in the process where tests find it.
const FOLDER: &str = "BATON_FAKE_GPU_FOLDER";
/// The one seed to try, to repeat a failure.
const SEED: &str = "BATON_FAKE_GPU_SEED";
/// What a test leaves in that folder when it has come to its end.
const DONE: &str = "done";

/// Times that a host has stood still until a device had done something.
#[unsafe(no_mangle)]
extern "C" fn baton_fake_gpu_host_waits() -> u64 {
    world::with(|world| world.host_waits)
}

/// Decides what is done next, and next, and next.
#[unsafe(no_mangle)]
extern "C" fn baton_fake_gpu_seed(seed: u64) {
    world::with(|world| world.random.0 = seed);
}

/// Has every abort of a communicator hang from now on, as it may where a peer is lost.
#[unsafe(no_mangle)]
extern "C" fn baton_fake_gpu_hang_aborts() {
    world::with(|world| world.aborts_hang = true);
}

/// The library as tests in its process reach it.
///
/// The program that links this crate has it twice: once as code of its own, whose world stays empty, and
/// once as the shared library that stands for the driver.
#[derive(Debug)]
pub struct FakeGpu {
    library: libloading::Library,
}

impl FakeGpu {
    /// Times that a host has stood still until a device had done something.
    #[must_use]
    pub fn host_waits(&self) -> u64 {
        // SAFETY: the function is above.
        unsafe {
            self.library.get::<extern "C" fn() -> u64>(b"baton_fake_gpu_host_waits").unwrap()()
        }
    }

    /// Has every abort of a communicator hang from now on, as it may where a peer is lost.
    pub fn hang_aborts(&self) {
        // SAFETY: the function is above.
        unsafe { self.library.get::<extern "C" fn()>(b"baton_fake_gpu_hang_aborts").unwrap()() }
    }

    fn seed(&self, seed: u64) {
        // SAFETY: the function is above.
        unsafe { self.library.get::<extern "C" fn(u64)>(b"baton_fake_gpu_seed").unwrap()(seed) }
    }
}

/// Runs `body` in a process of its own that finds the fake in place of NVIDIA's libraries. `test` is the
/// full name of the calling test, by which that process calls it again.
///
/// # Panics
/// The body did.
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
    // Cargo puts the library of a dependency beside the tests.
    let fake = program.with_file_name("libbaton_fake_gpu.so");
    assert!(fake.exists(), "{} was not built", fake.display());
    let folder = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libcuda.so.1", "libnccl.so"] {
        symlink(&fake, folder.path().join(name)).unwrap();
    }
    let output = Command::new(program)
        .args([test, "--exact", "--include-ignored", "--nocapture"])
        .env(FOLDER, folder.path())
        .env("LD_LIBRARY_PATH", folder.path())
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "with fake GPUs, {test} ended with {}:\n{told}",
        output.status
    );
    assert!(folder.path().join(DONE).exists(), "there is no test of the name {test}");
}

/// [`run`]s `body` with each of `seeds` orders, or with the one that `BATON_FAKE_GPU_SEED` names. With
/// several threads a seed does not decide everything.
///
/// # Panics
/// The body did; the seed is printed.
pub fn for_seeds(test: &str, seeds: u64, body: impl Fn(&FakeGpu, u64)) {
    let chosen = env::var(SEED).ok().map(|seed| seed.parse().expect("a number"));
    let seeds = chosen.map_or(0..seeds, |seed| seed..seed + 1);
    run(test, |gpu| {
        for seed in seeds {
            let told = Told(seed);
            gpu.seed(seed);
            body(gpu, seed);
            drop(told);
        }
    });
}

/// Tells the seed if the body panics.
struct Told(u64);

impl Drop for Told {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("repeat with {SEED}={}", self.0);
        }
    }
}
