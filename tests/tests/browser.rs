//! Tests the dashboard of a real job in a real browser. `crates/dashboard/browser/` has more tests, with a simulated job.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests may panic")]

use std::{env, fs, process::Stdio};

use baton_job::exit;
use baton_tests::{Cluster, in_time, skipped};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdin, ChildStdout, Command},
};

/// What the browser prints, in its profile.
const LOG: &str = "printed.log";

/// A page in a headless Chromium that is controlled with the Chrome DevTools Protocol.
struct Page {
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    last_id: u64,
    session: Option<String>,
    /// Exceptions and errors that the page logged.
    faults: Vec<Value>,
    _process: Child,
    profile: TempDir,
}

impl Page {
    /// Starts the browser with an empty page.
    async fn start(chromium: &str) -> Self {
        let profile = tempfile::tempdir().unwrap();
        // The protocol uses the file descriptors 3 and 4: one JSON object after the other, each with a zero byte.
        let mut process = Command::new("sh")
            .args(["-c", "log=$1; shift; exec \"$@\" 3<&0 4>&1 </dev/null >\"$log\" 2>&1", "sh"])
            .arg(profile.path().join(LOG))
            .arg(chromium)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"])
            .args(["--disable-background-networking", "--disable-component-update"])
            .args(["--disable-sync", "--remote-debugging-pipe"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut page = Self {
            commands: process.stdin.take().unwrap(),
            answers: BufReader::new(process.stdout.take().unwrap()),
            last_id: 0,
            session: None,
            faults: Vec::new(),
            _process: process,
            profile,
        };
        let target = page.call("Target.createTarget", json!({ "url": "about:blank" })).await;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = page.call("Target.attachToTarget", attach).await;
        page.session = Some(session["sessionId"].as_str().unwrap().to_owned());
        page.call("Runtime.enable", json!({})).await;
        page.call("Log.enable", json!({})).await;
        page
    }

    /// Calls a method of the protocol and waits for its result.
    async fn call(&mut self, method: &str, params: Value) -> Value {
        self.last_id += 1;
        let mut command = json!({ "id": self.last_id, "method": method, "params": params });
        if let Some(session) = &self.session {
            command["sessionId"] = session.as_str().into();
        }
        self.commands.write_all(format!("{command}\0").as_bytes()).await.unwrap();
        loop {
            let mut message = Vec::new();
            let read = self.answers.read_until(0, &mut message);
            if in_time(method, read).await.unwrap() == 0 {
                let log = fs::read_to_string(self.profile.path().join(LOG)).unwrap();
                panic!("{method}: the browser ended:\n{log}");
            }
            message.pop();
            let mut message: Value = serde_json::from_slice(&message).unwrap();
            let is_fault = message["method"] == "Runtime.exceptionThrown"
                || message["params"]["entry"]["level"] == "error";
            if message["id"] == self.last_id {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].take();
            } else if is_fault {
                self.faults.push(message);
            }
        }
    }

    async fn evaluate(&mut self, expression: &str) -> Value {
        let params =
            json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let mut result = self.call("Runtime.evaluate", params).await;
        assert!(result["exceptionDetails"].is_null(), "{expression}: {result}");
        result["result"]["value"].take()
    }

    /// Waits until a condition on the page is true.
    async fn until(&mut self, condition: &str) {
        let look = format!("const look = () => ({condition}) ? done(1) : setTimeout(look, 20)");
        self.evaluate(&format!("new Promise((done) => {{ {look}; look(); }})")).await;
    }

    /// Waits until an element's text contains `text`.
    async fn until_text(&mut self, element: &str, text: &str) {
        let shown = format!("document.querySelector('{element}')?.innerText.includes('{text}')");
        self.until(&shown).await;
    }

    /// Clicks an element once it is there and enabled.
    async fn click(&mut self, element: &str) {
        self.until(&format!("document.querySelector('{element}')?.disabled === false")).await;
        self.evaluate(&format!("document.querySelector('{element}').click()")).await;
    }
}

#[tokio::test]
async fn a_browser_shows_a_real_job_and_drains_it() {
    let chromium = env::var("CHROMIUM").unwrap_or_else(|_| "chromium".to_owned());
    let version = Command::new(&chromium).arg("--version").output().await;
    if version.is_err() {
        return skipped(&format!("no Chromium: {chromium} is not there; install it"));
    }
    let mut cluster = Cluster::endless();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    cluster.events().await.saved_at(30).await;

    let mut page = Page::start(&chromium).await;
    page.call("Page.navigate", json!({ "url": cluster.url() })).await;

    page.until_text("#name", "story").await;
    page.until_text("#phase", "training").await;
    page.until("document.querySelectorAll('#ranks tbody tr').length === 2").await;
    page.until_text("#hosts tbody", "node").await;
    page.until("document.querySelector('#charts svg path.curve[d^=M]')").await;
    page.until_text("#events", "generation 1").await;
    page.until_text("#checkpoints", "complete").await;
    page.until_text("#log", "rank 1").await;
    let progress = page.evaluate("document.querySelector('#progress-text').innerText").await;
    page.until(&format!("document.querySelector('#progress-text').innerText !== {progress}")).await;
    assert_eq!(page.faults, [Value::Null; 0]);

    page.click("[data-action=drain]").await;
    page.click("#confirm[open] #confirm-yes").await;

    let (coordinator, agents) = cluster.finish().await;
    let drained = Some(i32::from(exit::DRAINED));
    assert_eq!(coordinator.code(), drained, "{}", cluster.log("coordinator"));
    assert_eq!(agents[0].code(), drained, "{}", cluster.log("agent"));
}
