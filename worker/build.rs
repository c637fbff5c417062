//! Lets the binary find libtorch without `LD_LIBRARY_PATH`, which still overrides it: where it was built, or in the
//! folders of `BATON_RPATH`, which may begin with `$ORIGIN`.

use std::env;

fn main() {
    const VARIABLES: [&str; 2] = ["BATON_RPATH", "DEP_BATON_TRAINER_LIBTORCH_LIB"];
    for variable in VARIABLES {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    if let Some(folders) = VARIABLES.iter().find_map(|variable| env::var(variable).ok()) {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{folders}");
    }
}
