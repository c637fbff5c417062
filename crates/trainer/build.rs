//! Compiles the C++ files against libtorch's headers, and lets tests, examples and benches of this crate find
//! libtorch without `LD_LIBRARY_PATH`.
//!
//! Cargo does not pass link arguments on to dependent crates: a crate with a binary sets the same argument from
//! `DEP_BATON_TRAINER_LIBTORCH_LIB`, which this script provides.

use std::{env, path::Path};

fn main() {
    // torch-sys publishes the folder of the libraries (`links = "tch"`).
    println!("cargo::rerun-if-env-changed=DEP_TCH_LIBTORCH_LIB");
    let folder = env::var("DEP_TCH_LIBTORCH_LIB").unwrap_or_default();
    if !Path::new(&folder).join("libtorch_cpu.so").is_file() {
        println!("cargo::error=no libtorch_cpu.so in {folder:?}: run `make setup`");
        return;
    }
    compile(Path::new(&folder));
    println!("cargo::rustc-link-arg=-Wl,-rpath,{folder}");
    println!("cargo::metadata=libtorch_lib={folder}");
}

/// Uses the same settings as torch-sys for its own file.
fn compile(libraries: &Path) {
    /// Includes the others.
    const TORCH_CPP: &str = "src/torch/torch.cpp";
    const INCLUDED: [&str; 10] = [
        "../gpu/src/kernels/batch_norm.h",
        "src/torch/context.cpp",
        "src/torch/decoder/capped.cpp",
        "src/torch/decoder/dropout.cpp",
        "src/torch/error_text.h",
        "src/torch/fused/batch_norm.cpp",
        "src/torch/profiler.cpp",
        "src/torch/program/executor.cpp",
        "src/torch/program/executor.h",
        "src/torch/program/recompute.cpp",
    ];
    /// Folder of batch_norm.h.
    const KERNELS: &str = "../gpu/src/kernels";
    for file in INCLUDED.into_iter().chain([TORCH_CPP]) {
        println!("cargo::rerun-if-changed={file}");
    }
    let include = libraries.join("../include");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        .file(TORCH_CPP)
        .include(KERNELS)
        // Warnings only for our own code.
        .flag(format!("-isystem{}", include.display()))
        .flag(format!("-isystem{}", include.join("torch/csrc/api/include").display()))
        .compile("baton_trainer_torch");
}
