//! What the watch logs. In a separate test binary, because the log belongs to the whole process.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test's helpers may fail as loudly as the test"
)]

mod service;
mod until;

use std::{
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use baton_imds::{Settings, watch};
use service::{Misbehaviour, REBALANCE, Service, TOKEN};
use tracing_subscriber::fmt::MakeWriter;
use until::until;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn count(&self, text: &str) -> usize {
        let log = self.0.lock().unwrap();
        String::from_utf8_lossy(&log).lines().filter(|line| line.contains(text)).count()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[tokio::test]
async fn each_problem_is_logged_once() {
    let log = Log::default();
    let lines = tracing_subscriber::fmt().with_writer(log.clone()).with_ansi(false);
    lines.with_env_filter("baton_imds=debug").init();
    let service = Service::start();
    let settings = Settings::from_variables(|name| service.variable(name));
    let settings = Settings {
        poll_interval: Duration::from_millis(5),
        discovery_interval: Duration::from_millis(5),
        warn_after: Duration::from_millis(50),
        ..settings.unwrap().unwrap()
    };
    let requests = async |path, count| {
        let goal = service.requests(path) + count;
        until(|| service.requests(path) >= goal).await;
    };

    service.misbehave(Misbehaviour::Drop);
    let watching = tokio::spawn(watch(settings, |_| ()));
    requests(TOKEN, 5).await;
    service.behave();
    until(|| log.count("INFO") == 1).await;
    assert_eq!(log.count("DEBUG"), 1);
    assert_eq!(log.count("no instance metadata service: not on EC2"), 1);

    for outage in 1..3 {
        service.misbehave_at(REBALANCE, Misbehaviour::Status(500));
        until(|| log.count("rebalance recommendations may be missed") == outage).await;
        requests(REBALANCE, 5).await;
        service.behave();
        until(|| log.count("can be read again: rebalance recommendations") == outage).await;
        assert_eq!(log.count("rebalance recommendations may be missed"), outage);
    }
    let cause = "rebalance: answered 500 Internal Server Error";
    assert_eq!(log.count(cause), 2);

    service.misbehave_at(REBALANCE, Misbehaviour::Garbage);
    requests(REBALANCE, 5).await;
    assert_eq!(log.count("unexpected content in the instance metadata"), 1);
    assert_eq!(log.count("WARN"), 3);
    assert_eq!(log.count("spot notices"), 0);
    watching.abort();
}
