//! Hands the git revision of the checkout to the compiler.

use std::{env, process::Command};

fn main() {
    println!("cargo::rerun-if-env-changed=BATON_REVISION");
    // HEAD names a branch; its log grows with every commit and checkout.
    for file in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--path-format=absolute", "--git-path", file]) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    let revision = env::var("BATON_REVISION")
        .ok()
        .or_else(|| git(&["rev-parse", "--short=12", "HEAD"]))
        .unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=BATON_REVISION={revision}");
}

/// What git prints; none without git or outside a checkout, as in a source tarball.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
