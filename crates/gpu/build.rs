//! Compiles the kernels for the host, and lets tests find NVRTC among libtorch's libraries.

use std::{env, path::Path};

fn main() {
    println!("cargo::rerun-if-changed=src/kernels");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .file("src/kernels/host.cpp")
        .warnings(true)
        // Pragmas in kernels are for the GPU's compiler.
        .flag("-Wno-unknown-pragmas")
        // What `getcontext` fills in counts as never written.
        .flag("-Wno-maybe-uninitialized")
        // Rounded as written: the same bits on every CPU.
        .flag("-ffp-contract=off")
        // Whatever the profile: an unoptimised one takes minutes in the trainer's tests.
        .opt_level(2)
        .compile("baton_kernels");

    // Where `make setup` has it, or a link to it.
    println!("cargo::rerun-if-env-changed=LIBTORCH");
    if let Some(libtorch) = env::var_os("LIBTORCH") {
        let folder = Path::new(&libtorch).join("lib");
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", folder.display());
    }
}
