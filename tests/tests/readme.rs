//! Tests that every command of the README works exactly as printed there.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

use std::{fs, os::unix::fs::symlink, path::Path, process::Stdio};

use baton_tests::{Cluster, binary, in_time};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{Child, Command},
};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// The lines of the README's shell blocks, without comments.
fn commands() -> Vec<String> {
    let readme = fs::read_to_string(Path::new(ROOT).join("README.md")).unwrap();
    let blocks = readme.split("```bash\n").skip(1).map(|block| block.split("```").next().unwrap());
    let lines = blocks.flat_map(str::lines).map(|line| line.split(" #").next().unwrap().trim());
    lines.filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

fn bash(folder: &Path, line: &str) -> Command {
    let mut command = Command::new("bash");
    command.args(["-c", line]).current_dir(folder).kill_on_drop(true);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// What it prints; panics with that unless it succeeds.
async fn output(line: &str, child: Child) -> String {
    let output = in_time(line, child.wait_with_output()).await.unwrap();
    let text =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "`{line}` failed: {}", text.concat());
    text.concat()
}

/// Reads what the child prints until it has printed `text`.
async fn shows(child: &mut Child, text: &str) {
    let mut shown = Vec::new();
    while !String::from_utf8_lossy(&shown).contains(text) {
        let read = child.stdout.as_mut().unwrap().read_buf(&mut shown).await.unwrap();
        assert_ne!(read, 0, "it ended: {}", String::from_utf8_lossy(&shown));
    }
}

#[tokio::test]
async fn every_command_of_the_readme_works_while_a_job_trains() {
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    cluster.events().await.saved_at(1).await;

    // A checkout as the README's reader has it: `target/debug` has the programs.
    let checkout = tempfile::tempdir().unwrap();
    fs::create_dir(checkout.path().join("target")).unwrap();
    symlink(binary("baton").parent().unwrap(), checkout.path().join("target/debug")).unwrap();

    let commands = commands();
    let mut setup = String::new();
    for line in &commands {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            // These build and train for minutes, and CI runs them; here, check only that they exist and what they run.
            ["make", target] => {
                let line = format!("make --dry-run {target}");
                let steps = output(&line, bash(Path::new(ROOT), &line).spawn().unwrap()).await;
                let step = if *target == "run" {
                    "baton up recipes/digits_cpu.toml"
                } else {
                    "nextest run"
                };
                assert!(steps.contains(step), "{line}: {steps}");
            }
            ["export", ..] => setup = format!("{line} && "),
            // A screen needs a terminal: `script` provides one, without a size.
            ["baton", "top"] => {
                let top = "stty rows 30 columns 100; baton top";
                let line = format!("{setup}script --quiet --return --command '{top}' /dev/null");
                let mut command = bash(checkout.path(), &line);
                let mut child = command.env("BATON_COORDINATOR", cluster.url()).spawn().unwrap();
                in_time("the job on the screen", shows(&mut child, "story")).await;
                // The key that quits.
                child.stdin.take().unwrap().write_all(b"q").await.unwrap();
                output(&line, child).await;
            }
            ["baton", ..] => {
                let mut command = bash(checkout.path(), &format!("{setup}{line}"));
                let child = command.env("BATON_COORDINATOR", cluster.url()).spawn().unwrap();
                assert!(!output(line, child).await.is_empty());
            }
            _ => panic!("no test runs `{line}`"),
        }
    }
    for expected in ["make run", "make test", "baton top", "baton status", "baton drain"] {
        assert!(commands.iter().any(|line| line == expected), "{expected} is not in {commands:?}");
    }
    // The last of them drained the job.
    let (coordinator, _) = cluster.finish().await;
    assert_eq!(coordinator.code(), Some(75));
}
