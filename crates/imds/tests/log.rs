//! What the watch says in the log. A file of its own: the log belongs to the whole process.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test's helpers may fail as loudly as the test"
)]

mod service;

use std::{
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use baton_imds::{Settings, watch};
use service::{Misbehaviour, REBALANCE, Service};
use tokio::time::{sleep, timeout};
use tracing_subscriber::fmt::MakeWriter;

const TOKEN: &str = "/latest/api/token";

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn count(&self, what: &str) -> usize {
        let log = self.0.lock().unwrap();
        String::from_utf8_lossy(&log).lines().filter(|line| line.contains(what)).count()
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

async fn until(condition: impl Fn() -> bool) {
    let poll = async {
        while !condition() {
            sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(Duration::from_secs(30), poll).await.expect("it did not come to pass");
}

#[tokio::test]
async fn each_trouble_is_one_line() {
    let log = Log::default();
    let lines = tracing_subscriber::fmt().with_writer(log.clone()).with_ansi(false);
    lines.with_env_filter("baton_imds=debug").init();
    let service = Service::start();
    let environment = service.environment();
    let settings = Settings::from_variables(|name| {
        let found = environment.iter().find(|(variable, _)| variable == name);
        found.map(|(_, value)| value.clone())
    });
    let settings = Settings {
        period: Duration::from_millis(5),
        rest: Duration::from_millis(5),
        patience: Duration::from_millis(50),
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
    assert_eq!(log.count("no instance metadata: not on EC2"), 1);

    for outage in 1..3 {
        service.misbehave_at(REBALANCE, Misbehaviour::Status(500));
        until(|| log.count("spot notices cannot be seen") == outage).await;
        requests(REBALANCE, 5).await;
        service.behave();
        until(|| log.count("answers again") == outage).await;
        assert_eq!(log.count("spot notices cannot be seen"), outage);
    }
    let why = "rebalance: answered 500 Internal Server Error";
    assert_eq!(log.count(why), 2);

    service.misbehave_at(REBALANCE, Misbehaviour::Garbage);
    requests(REBALANCE, 5).await;
    assert_eq!(log.count("odd instance metadata"), 1);
    assert_eq!(log.count("WARN"), 3);
    watching.abort();
}
