//! Hosts on this machine: network namespaces on one bridge, for tests that start themselves again inside new namespaces.

#![allow(dead_code, reason = "each test uses a part")]

use std::{
    path::Path,
    process::{Command, Output},
};

use baton_tests::skipped;

/// Environment variable that is set for the test inside the namespaces.
const INSIDE: &str = "BATON_TEST_INSIDE_NAMESPACES";
/// Address of the bridge.
pub(crate) const BRIDGE: &str = "10.77.0.1";

/// The address of a host, of which the first is 1.
pub(crate) fn address(host: usize) -> String {
    format!("{BRIDGE}{host}")
}

/// What starts a program on a host.
pub(crate) fn launcher(host: usize) -> [String; 4] {
    ["ip", "netns", "exec", &format!("n{host}")].map(str::to_owned)
}

/// What a test printed inside new namespaces, and whether it passed.
pub(crate) struct Inside {
    pub(crate) has_passed: bool,
    pub(crate) text: String,
}

/// Runs a test of the same file inside new namespaces, where it has the needed rights. `None` after saying that it is
/// skipped, where the kernel or the tools do not allow this.
pub(crate) fn try_inside(test: &str, environment: &[(&str, &str)]) -> Option<Inside> {
    let prepare = "mount -t tmpfs tmpfs /run && ip link set lo up && ip link add br0 type bridge \
                   && ip addr add 10.77.0.1/24 dev br0 && ip link set br0 up && exec \"$@\"";
    let inside = |program: &Path| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "--mount", "sh", "-c", prepare, "sh"]);
        command.arg(program);
        command
    };
    let probe =
        "ip netns add probe && ip link add v type veth peer name e && ip netns exec probe true";
    let no_namespaces = |problem: &str| skipped(&format!("no network namespaces: {problem}"));
    match inside("sh".as_ref()).args(["-c", probe]).output() {
        Ok(Output { status, .. }) if status.success() => {}
        Ok(Output { stderr, .. }) => {
            no_namespaces(String::from_utf8_lossy(&stderr).trim());
            return None;
        }
        Err(error) => {
            no_namespaces(&error.to_string());
            return None;
        }
    }
    let arguments = ["--exact", test, "--ignored", "--nocapture"];
    let mut command = inside(&std::env::current_exe().unwrap());
    command.args(arguments).env(INSIDE, "1").envs(environment.iter().copied());
    let ended = command.output().unwrap();
    let text = String::from_utf8_lossy(&ended.stdout) + String::from_utf8_lossy(&ended.stderr);
    let has_passed = ended.status.success() && text.contains("1 passed");
    Some(Inside { has_passed, text: text.into_owned() })
}

/// Runs a test of the same file inside new namespaces, and asserts that it passes.
pub(crate) fn run_inside(test: &str) {
    let Some(Inside { has_passed, text }) = try_inside(test, &[]) else { return };
    assert!(has_passed, "{text}");
    // A part may have been skipped.
    eprint!("{text}");
}

/// Asserts that this is the test inside: outside of the namespaces, it would change the network of this machine.
pub(crate) fn assert_inside() {
    assert!(std::env::var_os(INSIDE).is_some(), "run the test that starts this one");
}

/// Runs `ip …`, split at spaces; returns what it printed.
pub(crate) fn ip(arguments: &str) -> String {
    let ended = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(ended.status.success(), "ip {arguments}: {ended:?}");
    String::from_utf8_lossy(&ended.stdout).into_owned()
}

/// Connects a new host to the bridge: namespace `n1`, its link `e1`, and the bridge's end of it, `v1`.
pub(crate) fn add_host(host: usize) {
    let at = address(host);
    ip(&format!("netns add n{host}"));
    ip(&format!("link add v{host} type veth peer name e{host}"));
    ip(&format!("link set e{host} netns n{host}"));
    ip(&format!("link set v{host} master br0 up"));
    ip(&format!("-n n{host} addr add {at}/24 dev e{host}"));
    ip(&format!("-n n{host} link set e{host} up"));
    ip(&format!("-n n{host} link set lo up"));
}
