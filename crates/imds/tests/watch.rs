//! The watch, against a metadata service that behaves and one that does not.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test's helpers may fail as loudly as the test"
)]

mod service;
mod until;

use std::time::{Duration, SystemTime};

use baton_imds::{Kind, Notice, Settings, watch};
use service::{INTERRUPTION, LIFECYCLE, Misbehaviour, REBALANCE, Service, TOKEN, Tokens};
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};
use until::{LONG, until};

struct Watching {
    notices: mpsc::UnboundedReceiver<Notice>,
    task: JoinHandle<std::convert::Infallible>,
}

impl Watching {
    fn start(service: &Service) -> Self {
        Self::start_with(settings(service))
    }

    fn start_with(settings: Settings) -> Self {
        let (sender, notices) = mpsc::unbounded_channel();
        let tell = move |notice| sender.send(notice).unwrap();
        Self { notices, task: tokio::spawn(watch(settings, tell)) }
    }

    async fn next(&mut self) -> Notice {
        timeout(LONG, self.notices.recv()).await.expect("no notice").expect("the watch ended")
    }

    /// After some more polls.
    async fn hears_no_more(&mut self, service: &Service) {
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
        period: Duration::from_millis(5),
        timeout: Duration::from_millis(500),
        rest: Duration::from_millis(5),
        ..settings.unwrap().unwrap()
    }
}

/// Waits for so many more requests.
async fn polls(service: &Service, path: &str, count: usize) {
    let goal = service.requests(path) + count;
    until(|| service.requests(path) >= goal).await;
}

#[tokio::test]
async fn interruption_is_told_with_its_end() {
    let service = Service::start();
    let mut watching = Watching::start(&service);
    watching.hears_no_more(&service).await;
    service.interrupt("terminate", 120);
    let notice = watching.next().await;
    assert_eq!(notice.kind, Kind::Interruption);
    assert!(notice.reason.starts_with("AWS spot instance-action: terminate at 20"), "{notice:?}");
    let left = notice.end.unwrap().duration_since(SystemTime::now()).unwrap();
    assert!((60..=120).contains(&left.as_secs()), "{left:?}");
    watching.hears_no_more(&service).await;
}

#[tokio::test]
async fn every_source_tells_for_itself() {
    let service = Service::start();
    service.lifecycle("InService");
    let mut watching = Watching::start(&service);
    watching.hears_no_more(&service).await;
    service.rebalance();
    let notice = watching.next().await;
    assert_eq!((notice.kind, notice.end), (Kind::Rebalance, None));
    service.interrupt("stop", 120);
    assert_eq!(watching.next().await.kind, Kind::Interruption);
    service.lifecycle("Terminated");
    let notice = watching.next().await;
    assert_eq!((notice.kind, notice.end), (Kind::Lifecycle, None));
    assert_eq!(notice.reason, "AWS Auto Scaling target-lifecycle-state: Terminated");
    watching.hears_no_more(&service).await;
}

#[tokio::test]
async fn times_of_the_mock_slide_and_tell_nothing_new() {
    for tokens in [Tokens::Required, Tokens::Optional] {
        let service = Service::start_as_mock(tokens);
        service.interrupt("terminate", 120);
        service.rebalance();
        let mut watching = Watching::start(&service);
        let kinds = [watching.next().await.kind, watching.next().await.kind];
        assert!(kinds.contains(&Kind::Interruption) && kinds.contains(&Kind::Rebalance));
        for _ in 0..3 {
            service.advance(Duration::from_secs(30));
            watching.hears_no_more(&service).await;
        }
    }
}

#[tokio::test]
async fn end_in_the_past_is_now() {
    let service = Service::start();
    let begin = SystemTime::now();
    service.interrupt("hibernate", -3600);
    let end = Watching::start(&service).next().await.end.unwrap();
    assert!(begin <= end && end <= SystemTime::now());
}

#[tokio::test]
async fn unreadable_interruption_is_a_notice_to_go() {
    for misbehaviour in [Misbehaviour::Garbage, Misbehaviour::Huge] {
        let service = Service::start();
        service.misbehave(misbehaviour);
        let mut watching = Watching::start(&service);
        let notice = watching.next().await;
        assert_eq!((notice.kind, notice.end), (Kind::Interruption, None));
        watching.hears_no_more(&service).await;
        service.behave();
        service.interrupt("terminate", 120);
        assert!(watching.next().await.end.is_some());
    }
}

#[tokio::test]
async fn endless_documents_are_read_in_part() {
    let service = Service::start();
    service.misbehave_at(REBALANCE, Misbehaviour::Huge);
    let mut watching = Watching::start(&service);
    polls(&service, REBALANCE, 10).await;
    // Sockets take some megabytes ahead of their reader.
    assert!(service.huge_bytes() < 20 * 16 * 1024 * 1024, "{}", service.huge_bytes());
    service.interrupt("terminate", 120);
    assert_eq!(watching.next().await.kind, Kind::Interruption);
}

#[tokio::test]
async fn source_that_hangs_hides_no_other() {
    for misbehaviour in [Misbehaviour::Hang, Misbehaviour::Drip] {
        let service = Service::start();
        service.misbehave_at(REBALANCE, misbehaviour);
        service.misbehave_at(INTERRUPTION, misbehaviour);
        // Nothing here waits for it.
        let mut watching =
            Watching::start_with(Settings { timeout: 10 * LONG, ..settings(&service) });
        service.lifecycle("Terminated");
        assert_eq!(watching.next().await.kind, Kind::Lifecycle);
    }
}

#[tokio::test]
async fn connections_that_were_given_up_are_closed() {
    for misbehaviour in [Misbehaviour::Hang, Misbehaviour::Drip, Misbehaviour::Huge] {
        let service = Service::start();
        let timeout = Duration::from_millis(20);
        let _watching = Watching::start_with(Settings { timeout, ..settings(&service) });
        polls(&service, REBALANCE, 1).await;
        service.misbehave_at(REBALANCE, misbehaviour);
        polls(&service, REBALANCE, 20).await;
        // The service notices a moment later.
        until(|| service.connections() < 8).await;
    }
}

/// All of these end in a notice that came while the service was out of order.
async fn is_told_after(misbehaviour: Misbehaviour, path: &str) {
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
    let kind = watching.next().await.kind;
    assert_eq!(kind, Kind::Interruption, "{misbehaviour:?} at {path}");
    watching.hears_no_more(&service).await;
}

#[tokio::test]
async fn misbehaviour_costs_only_the_polls_it_hits() {
    for misbehaviour in [
        Misbehaviour::Hang,
        Misbehaviour::Drop,
        Misbehaviour::Drip,
        Misbehaviour::Status(403),
        Misbehaviour::Status(500),
        Misbehaviour::Status(503),
    ] {
        is_told_after(misbehaviour, INTERRUPTION).await;
        is_told_after(misbehaviour, TOKEN).await;
    }
    is_told_after(Misbehaviour::Unauthorized, INTERRUPTION).await;
    is_told_after(Misbehaviour::Status(404), TOKEN).await;
}

#[tokio::test]
async fn interruption_that_was_called_off_is_told_anew_when_it_comes_after_all() {
    let service = Service::start();
    let mut watching = Watching::start(&service);
    service.interrupt("terminate", 0);
    watching.next().await;
    service.withdraw();
    polls(&service, INTERRUPTION, 5).await;
    service.interrupt("stop", 120);
    assert_eq!(watching.next().await.kind, Kind::Interruption);
}

#[tokio::test]
async fn token_is_kept_until_it_is_refused() {
    let service = Service::start();
    let _watching = Watching::start(&service);
    polls(&service, LIFECYCLE, 20).await;
    assert_eq!(service.tokens_issued(), 1);
    service.forget_tokens();
    polls(&service, LIFECYCLE, 20).await;
    assert_eq!(service.tokens_issued(), 2);
}

#[tokio::test]
async fn token_that_cannot_be_renewed_is_used_to_its_end() {
    let service = Service::start();
    service.understate_life_of_tokens();
    let mut watching = Watching::start(&service);
    polls(&service, LIFECYCLE, 3).await;
    assert!(service.tokens_issued() >= 3);
    service.misbehave_at(TOKEN, Misbehaviour::Status(503));
    polls(&service, TOKEN, 2).await;
    service.interrupt("terminate", 120);
    assert_eq!(watching.next().await.kind, Kind::Interruption);
}

#[tokio::test]
async fn poll_with_a_refused_token_is_repeated_at_once() {
    let service = Service::start();
    service.misbehave(Misbehaviour::Unauthorized);
    let hour = Duration::from_secs(3600);
    let _watching = Watching::start_with(Settings { period: hour, ..settings(&service) });
    // Once, with another token, and no more often if that does not help.
    until(|| service.requests(LIFECYCLE) == 2).await;
    assert_eq!(service.tokens_issued(), 2);
}

#[tokio::test]
async fn machine_that_is_no_instance_is_asked_rarely() {
    let hour = Duration::from_secs(3600);
    for misbehaviour in [Misbehaviour::Drop, Misbehaviour::Hang, Misbehaviour::Status(404)] {
        let service = Service::start();
        service.misbehave(misbehaviour);
        let settings = Settings {
            period: hour,
            timeout: Duration::from_millis(20),
            rest: Duration::from_millis(30),
            ..settings(&service)
        };
        let _watching = Watching::start_with(settings);
        // It rests instead of keeping its period, and asks for no documents.
        until(|| service.requests(TOKEN) >= 3).await;
        assert_eq!(service.requests(INTERRUPTION), 0);
        // And it finds a service that comes late.
        service.behave();
        until(|| service.requests(INTERRUPTION) == 1).await;
    }
}

#[tokio::test]
async fn overloaded_service_is_not_taken_for_none() {
    let service = Service::start();
    service.misbehave(Misbehaviour::Status(503));
    let rest = Duration::from_secs(3600);
    let mut watching = Watching::start_with(Settings { rest, ..settings(&service) });
    polls(&service, TOKEN, 3).await;
    service.behave();
    service.interrupt("terminate", 120);
    assert_eq!(watching.next().await.kind, Kind::Interruption);
}
