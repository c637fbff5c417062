//! Lets the binary find libtorch without `LD_LIBRARY_PATH`, which still overrides it.

use std::env;

fn main() {
    println!("cargo::rerun-if-env-changed=DEP_BATON_TRAINER_LIBTORCH_LIB");
    if let Ok(folder) = env::var("DEP_BATON_TRAINER_LIBTORCH_LIB") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{folder}");
    }
}
