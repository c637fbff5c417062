//! Lets `src/coverage.rs` define a function that libFuzzer also defines, but empty: the linker uses the first
//! definition, and libraries are linked in the order of their dependencies.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-link-arg-bins=-Wl,-z,muldefs");
}
