//! The watch against a metadata service, with and without faults.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test's helpers may fail as loudly as the test"
)]

mod service;
mod until;

use std::time::{Duration, SystemTime};

use baton_imds::{InterruptionNotice, NoticeSource, Settings, watch};
use service::{INTERRUPTION, LIFECYCLE, Misbehaviour, REBALANCE, Service, TOKEN, Tokens};
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};
use until::{TIMEOUT, until};

struct Watching {
    notices: mpsc::UnboundedReceiver<InterruptionNotice>,
    task: JoinHandle<std::convert::Infallible>,
}

impl Watching {
    fn start(service: &Service) -> Self {
        Self::start_with(settings(service))
    }

    fn start_with(settings: Settings) -> Self {
        let (sender, notices) = mpsc::unbounded_channel();
        let notify = move |notice| sender.send(notice).unwrap();
        Self { notices, task: tokio::spawn(watch(settings, notify)) }
    }

    async fn next(&mut self) -> InterruptionNotice {
        timeout(TIMEOUT, self.notices.recv()).await.expect("no notice").expect("the watch ended")
    }

    /// Checks that no further notice comes with the next polls.
    async fn expect_no_more(&mut self, service: &Service) {
        polls(service, INTERRUPTION, 5).await;
        assert_eq!(self.notices.try_recv().ok(), None);
        assert!(!self.task.is_finished());
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn settings(service: &Service) -> Settings {
    let settings = Settings::from_variables(|name| service.variable(name));
    Settings {
        poll_interval: Duration::from_millis(5),
        timeout: Duration::from_millis(500),
        discovery_interval: Duration::from_millis(5),
        ..settings.unwrap().unwrap()
    }
}

/// Waits for `count` more requests of `path`.
async fn polls(service: &Service, path: &str, count: usize) {
    let goal = service.requests(path) + count;
    until(|| service.requests(path) >= goal).await;
}

#[tokio::test]
async fn interruption_is_reported_with_its_end() {
    let service = Service::start();
    let mut watching = Watching::start(&service);
    watching.expect_no_more(&service).await;
    service.interrupt("terminate", 120);
    let notice = watching.next().await;
    assert_eq!(notice.source, NoticeSource::Interruption);
    assert!(notice.reason.starts_with("AWS spot instance-action: terminate at 20"), "{notice:?}");
    let left = notice.end.unwrap().duration_since(SystemTime::now()).unwrap();
    assert!((60..=120).contains(&left.as_secs()), "{left:?}");
    watching.expect_no_more(&service).await;
}

#[tokio::test]
async fn every_source_is_reported() {
    let service = Service::start();
    service.lifecycle("InService");
    let mut watching = Watching::start(&service);
    watching.expect_no_more(&service).await;
    service.rebalance();
    let notice = watching.next().await;
    assert_eq!((notice.source, notice.end), (NoticeSource::Rebalance, None));
    service.interrupt("stop", 120);
    assert_eq!(watching.next().await.source, NoticeSource::Interruption);
    service.lifecycle("Terminated");
    let notice = watching.next().await;
    assert_eq!((notice.source, notice.end), (NoticeSource::Lifecycle, None));
    assert_eq!(notice.reason, "AWS Auto Scaling target-lifecycle-state: Terminated");
    watching.expect_no_more(&service).await;
}

#[tokio::test]
async fn moving_times_of_the_mock_are_not_new_notices() {
    for tokens in [Tokens::Required, Tokens::Optional] {
        let service = Service::start_as_mock(tokens);
        service.interrupt("terminate", 120);
        service.rebalance();
        let mut watching = Watching::start(&service);
        let sources = [watching.next().await.source, watching.next().await.source];
        assert!(
            sources.contains(&NoticeSource::Interruption)
                && sources.contains(&NoticeSource::Rebalance)
        );
        for _ in 0..3 {
            service.advance(Duration::from_secs(30));
            watching.expect_no_more(&service).await;
        }
    }
}

#[tokio::test]
async fn end_in_the_past_becomes_now() {
    let service = Service::start();
    let begin = SystemTime::now();
    service.interrupt("hibernate", -3600);
    let end = Watching::start(&service).next().await.end.unwrap();
    assert!(begin <= end && end <= SystemTime::now());
}

#[tokio::test]
async fn unreadable_interruption_counts_as_a_notice() {
    for misbehaviour in [Misbehaviour::Garbage, Misbehaviour::Huge] {
        let service = Service::start();
        service.misbehave(misbehaviour);
        let mut watching = Watching::start(&service);
        let notice = watching.next().await;
        assert_eq!((notice.source, notice.end), (NoticeSource::Interruption, None));
        watching.expect_no_more(&service).await;
        service.behave();
        service.interrupt("terminate", 120);
        assert!(watching.next().await.end.is_some());
    }
}

#[tokio::test]
async fn only_the_beginning_of_an_endless_document_is_read() {
    let service = Service::start();
    service.misbehave_at(REBALANCE, Misbehaviour::Huge);
    let mut watching = Watching::start(&service);
    polls(&service, REBALANCE, 10).await;
    // Socket buffers hold some megabytes that the reader has not requested yet.
    assert!(service.huge_bytes() < 20 * 16 * 1024 * 1024, "{}", service.huge_bytes());
    service.interrupt("terminate", 120);
    assert_eq!(watching.next().await.source, NoticeSource::Interruption);
}

#[tokio::test]
async fn hanging_source_does_not_delay_the_others() {
    for misbehaviour in [Misbehaviour::Hang, Misbehaviour::Drip] {
        let service = Service::start();
        service.misbehave_at(REBALANCE, misbehaviour);
        service.misbehave_at(INTERRUPTION, misbehaviour);
        // The timeout is longer than this test waits.
        let mut watching =
            Watching::start_with(Settings { timeout: 10 * TIMEOUT, ..settings(&service) });
        service.lifecycle("Terminated");
        assert_eq!(watching.next().await.source, NoticeSource::Lifecycle);
    }
}

#[tokio::test]
async fn connections_are_closed_after_a_timeout() {
    for misbehaviour in [Misbehaviour::Hang, Misbehaviour::Drip, Misbehaviour::Huge] {
        let service = Service::start();
        let timeout = Duration::from_millis(20);
        let _watching = Watching::start_with(Settings { timeout, ..settings(&service) });
        polls(&service, REBALANCE, 1).await;
        service.misbehave_at(REBALANCE, misbehaviour);
        polls(&service, REBALANCE, 20).await;
        // The service notices the closed connections a little later.
        until(|| service.connections() < 8).await;
    }
}

/// Checks that a notice which appears during `misbehaviour` is reported afterwards.
async fn is_reported_after(misbehaviour: Misbehaviour, path: &str) {
    let service = Service::start();
    let settings = Settings { timeout: Duration::from_millis(200), ..settings(&service) };
    let mut watching = Watching::start_with(settings);
    polls(&service, INTERRUPTION, 2).await;
    service.misbehave_at(path, misbehaviour);
    if path == TOKEN {
        service.forget_tokens();
    }
    polls(&service, path, 3).await;
    service.interrupt("terminate", 120);
    service.behave();
    let source = watching.next().await.source;
    assert_eq!(source, NoticeSource::Interruption, "{misbehaviour:?} at {path}");
    watching.expect_no_more(&service).await;
}

#[tokio::test]
async fn misbehaviour_only_delays_a_notice() {
    for misbehaviour in [
        Misbehaviour::Hang,
        Misbehaviour::Drop,
        Misbehaviour::Drip,
        Misbehaviour::Status(403),
        Misbehaviour::Status(500),
        Misbehaviour::Status(503),
    ] {
        is_reported_after(misbehaviour, INTERRUPTION).await;
        is_reported_after(misbehaviour, TOKEN).await;
    }
    is_reported_after(Misbehaviour::Unauthorized, INTERRUPTION).await;
    is_reported_after(Misbehaviour::Status(404), TOKEN).await;
}

#[tokio::test]
async fn withdrawn_interruption_is_reported_again_when_it_returns() {
    let service = Service::start();
    let mut watching = Watching::start(&service);
    service.interrupt("terminate", 0);
    watching.next().await;
    service.withdraw();
    polls(&service, INTERRUPTION, 5).await;
    service.interrupt("stop", 120);
    assert_eq!(watching.next().await.source, NoticeSource::Interruption);
}

#[tokio::test]
async fn token_is_reused_until_it_is_refused() {
    let service = Service::start();
    let _watching = Watching::start(&service);
    polls(&service, LIFECYCLE, 20).await;
    assert_eq!(service.tokens_issued(), 1);
    service.forget_tokens();
    polls(&service, LIFECYCLE, 20).await;
    assert_eq!(service.tokens_issued(), 2);
}

#[tokio::test]
async fn token_that_cannot_be_renewed_is_used_until_it_expires() {
    let service = Service::start();
    service.understate_token_ttl();
    let mut watching = Watching::start(&service);
    polls(&service, LIFECYCLE, 3).await;
    assert!(service.tokens_issued() >= 3);
    service.misbehave_at(TOKEN, Misbehaviour::Status(503));
    polls(&service, TOKEN, 2).await;
    service.interrupt("terminate", 120);
    assert_eq!(watching.next().await.source, NoticeSource::Interruption);
}

#[tokio::test]
async fn poll_with_a_refused_token_is_repeated_at_once() {
    let service = Service::start();
    service.misbehave(Misbehaviour::Unauthorized);
    let hour = Duration::from_secs(3600);
    let _watching = Watching::start_with(Settings { poll_interval: hour, ..settings(&service) });
    // Once, with another token, and no more often if that does not help.
    until(|| service.requests(LIFECYCLE) == 2).await;
    assert_eq!(service.tokens_issued(), 2);
}

#[tokio::test]
async fn machine_outside_ec2_is_polled_rarely() {
    let hour = Duration::from_secs(3600);
    for misbehaviour in [Misbehaviour::Drop, Misbehaviour::Hang, Misbehaviour::Status(404)] {
        let service = Service::start();
        service.misbehave(misbehaviour);
        let settings = Settings {
            poll_interval: hour,
            timeout: Duration::from_millis(20),
            discovery_interval: Duration::from_millis(30),
            ..settings(&service)
        };
        let _watching = Watching::start_with(settings);
        // It uses the discovery interval instead of the poll interval, and requests no documents.
        until(|| service.requests(TOKEN) >= 3).await;
        assert_eq!(service.requests(INTERRUPTION), 0);
        // It finds a service that starts late.
        service.behave();
        until(|| service.requests(INTERRUPTION) == 1).await;
    }
}

#[tokio::test]
async fn overloaded_service_counts_as_found() {
    let service = Service::start();
    service.misbehave(Misbehaviour::Status(503));
    let discovery_interval = Duration::from_secs(3600);
    let mut watching = Watching::start_with(Settings { discovery_interval, ..settings(&service) });
    polls(&service, TOKEN, 3).await;
    service.behave();
    service.interrupt("terminate", 120);
    assert_eq!(watching.next().await.source, NoticeSource::Interruption);
}
