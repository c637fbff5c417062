//! Compiles the kernels for the host, and lets tests find NVRTC among libtorch's libraries.

use std::{env, path::Path};

fn main() {
    println!("cargo::rerun-if-changed=src/kernels");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .file("src/kernels/host.cpp")
        .warnings(true)
        // Pragmas in kernels are for NVRTC.
        .flag("-Wno-unknown-pragmas")
        // The compiler does not know that `getcontext` initialises its argument.
        .flag("-Wno-maybe-uninitialized")
        // No fused operations: the same bits on every CPU.
        .flag("-ffp-contract=off")
        // In every profile: without optimisation the trainer's tests would take minutes.
        .opt_level(2)
        .compile("baton_kernels");

    // The folder in which `make setup` installs libtorch, or a link to it.
    println!("cargo::rerun-if-env-changed=LIBTORCH");
    if let Some(libtorch) = env::var_os("LIBTORCH") {
        let folder = Path::new(&libtorch).join("lib");
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", folder.display());
    }
}
