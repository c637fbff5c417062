//! Lets `src/coverage.rs` define a function that libFuzzer has, too, but does nothing in: the first
//! definition that the linker meets is taken, and libraries come in the order of dependence.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-link-arg-bins=-Wl,-z,muldefs");
}
