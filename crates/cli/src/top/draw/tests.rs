use baton_job::Time;
use baton_proto::v1::{
    GetStatusResponse, Step, StreamLogsResponse, StreamMetricsResponse, WatchEventsResponse,
    stream_metrics_response::Metrics,
};
use insta::assert_snapshot;
use ratatui::{
    Terminal,
    backend::TestBackend,
    buffer::Buffer,
    crossterm::event::{KeyCode, KeyEvent},
};

use super::*;
use crate::{testing, top::state::Input};

const SMALL: (u16, u16) = (80, 24);
const LARGE: (u16, u16) = (200, 50);

fn state(status: GetStatusResponse) -> State {
    let mut state = State::new("http://127.0.0.1:29600".to_owned());
    let points = testing::points().into_iter().map(Input::Point);
    let events = testing::events().into_iter().map(Input::Event);
    let lines = testing::lines().into_iter().map(Input::Line);
    let inputs = points.chain(events).chain(lines).chain([Input::Status(Box::new(status))]);
    for input in inputs {
        state.handle(Time(0), input);
    }
    state
}

fn pressed(mut state: State, keys: &str) -> State {
    for key in keys.chars() {
        state.handle(Time(0), Input::Key(KeyEvent::from(KeyCode::Char(key))));
    }
    state
}

fn drawn((width, height): (u16, u16), state: &State, theme: Theme) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, state, theme)).unwrap();
    terminal.backend().buffer().clone()
}

fn text(size: (u16, u16), state: &State) -> String {
    let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).unwrap();
    terminal.draw(|frame| draw(frame, state, Theme::Plain)).unwrap();
    terminal.backend().to_string()
}

#[test]
fn training_on_a_small_terminal_pane_by_pane() {
    for pane in ["1", "2", "3", "4", "5"] {
        let state = pressed(state(testing::on_gpus()), pane);
        assert_snapshot!(format!("training_small_{pane}"), text(SMALL, &state));
    }
}

#[test]
fn training_on_gpus() {
    assert_snapshot!(text(LARGE, &state(testing::on_gpus())));
}

#[test]
fn training_without_telemetry() {
    assert_snapshot!(text(LARGE, &state(testing::training())));
}

#[test]
fn paused() {
    assert_snapshot!(text(SMALL, &state(testing::paused())));
}

#[test]
fn recovering() {
    assert_snapshot!(text(SMALL, &pressed(state(testing::recovering_again()), "4")));
    assert_snapshot!(text(LARGE, &state(testing::recovering_again())));
}

#[test]
fn draining() {
    assert_snapshot!(text(SMALL, &state(testing::draining())));
    let job = text(SMALL, &pressed(state(testing::draining()), "4"));
    assert!(job.contains("durable (…)") && job.contains("FAILS: cannot write"), "{job}");
}

#[test]
fn ended() {
    assert_snapshot!(text(SMALL, &pressed(state(testing::limited()), "4")));
}

#[test]
fn idle() {
    let mut state = State::new("http://127.0.0.1:29600".to_owned());
    state.handle(Time(0), Input::Status(Box::new(testing::idle())));
    assert_snapshot!(text(SMALL, &state));
    assert_snapshot!(text(LARGE, &state));
}

#[test]
fn disconnected() {
    let mut state = state(testing::training());
    let why = "no coordinator answers at http://127.0.0.1:29600 (--coordinator)".to_owned();
    state.handle(Time(12_000), Input::NoAnswer(why));
    assert_snapshot!(text(SMALL, &state));
}

#[test]
fn many_ranks_scroll() {
    let many = pressed(state(testing::many(64)), "2");
    assert_snapshot!(text(SMALL, &pressed(many, "G")));
    assert_snapshot!(text(LARGE, &state(testing::many(64))));
}

#[test]
fn a_request_is_confirmed_and_its_result_shown() {
    let mut state = pressed(state(testing::training()), "d");
    assert_snapshot!(text(SMALL, &state));
    state = pressed(state, "y");
    state.handle(Time(0), Input::Answer(Err("the job is being drained".to_owned())));
    assert!(text(SMALL, &state).contains("failed: the job is being drained"));
}

#[test]
fn keys_are_explained() {
    assert_snapshot!(text(SMALL, &pressed(state(testing::training()), "?")));
}

#[test]
fn a_tiny_terminal_gets_one_line() {
    let state = state(testing::training());
    let shown = text((40, 5), &state);
    assert!(shown.contains("60 x 16"), "{shown}");
    for size in [(0, 0), (1, 1), (59, 100), (60, 16), (139, 40), (140, 40), (500, 200)] {
        drawn(size, &state, Theme::Colours);
    }
}

#[test]
fn without_colours_there_are_none() {
    let buffer = drawn(LARGE, &state(testing::many(64)), Theme::Plain);
    let is_plain = |colour| colour == ratatui::style::Color::Reset;
    assert!(buffer.content().iter().all(|cell| is_plain(cell.fg) && is_plain(cell.bg)));
    let buffer = drawn(LARGE, &state(testing::many(64)), Theme::Colours);
    assert!(!buffer.content().iter().all(|cell| is_plain(cell.fg)));
}

/// A state with `text` in every text field and `number` in every number field.
fn hostile(text: &str, number: f64) -> State {
    let mut status = testing::many(3);
    let text = || text.to_owned();
    (status.name, status.reason) = (text(), text());
    (status.began_with, status.save_problem) = (Some(text()), Some(text()));
    status.pause = Some(baton_proto::v1::PauseStatus { reason: text(), seconds: number });
    status.drain = testing::draining().drain.map(|drain| baton_proto::v1::DrainStatus {
        reason: text(),
        seconds_left: number,
        ..drain
    });
    status.recoveries = testing::recovering_again().recoveries;
    status.recoveries.iter_mut().for_each(|recovery| {
        (recovery.cause, recovery.age_seconds) = (text(), number);
    });
    status.checkpoint.as_mut().unwrap().name = text();
    status.incidents.iter_mut().for_each(|incident| incident.cause = text());
    for rank in &mut status.ranks {
        (rank.node_id, rank.state) = (text(), text());
        (rank.slowdown, rank.heartbeat_age_seconds) = (Some(number), Some(number));
        rank.gpu.as_mut().unwrap().memory_total = 0;
    }
    for node in &mut status.nodes {
        node.node_id = text();
        node.host.as_mut().unwrap().cpu = number;
        node.host.as_mut().unwrap().sent_per_second = number;
    }
    let spending = status.spending.as_mut().unwrap();
    (spending.hours, spending.dollars, spending.used) = (number, Some(number), Some(number));
    let step = Step { loss: number, top1: number, lr: number, step: u64::MAX, ..Step::default() };
    status.latest = Some(step);
    status.eta_seconds = Some(number);
    status.epochs = 0;

    let mut state = state(status);
    state.handle(
        Time(0),
        Input::Event(WatchEventsResponse { message: text(), ..Default::default() }),
    );
    let line = StreamLogsResponse { line: text(), node_id: text(), ..Default::default() };
    state.handle(Time(0), Input::Line(line));
    for (number, step) in [(number, 0), (1.0, u64::MAX), (f64::MAX, 7), (f64::MIN, 8)] {
        let metrics =
            Some(Metrics::Step(Step { loss: number, lr: number, step, ..Step::default() }));
        state
            .handle(Time(0), Input::Point(StreamMetricsResponse { metrics, ..Default::default() }));
    }
    state.handle(Time(0), Input::Answer(Err(text())));
    state
}

#[test]
fn foreign_text_neither_controls_the_terminal_nor_crashes_the_dashboard() {
    let texts = [
        "\x1b[2J\x1b]0;title\x07\r\n\u{9b}31m\u{202e}back".to_owned(),
        "日本語".repeat(100),
        "e\u{301}\u{200d}👩\u{200d}👩\u{200d}👧".repeat(50),
        "\u{0}\u{7f}\u{85}".to_owned(),
        String::new(),
        "x".repeat(10_000),
    ];
    let numbers = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, 1e300, 0.0];
    for text in &texts {
        for number in numbers {
            for pane in ["1", "2", "3", "4", "5"] {
                let state = pressed(hostile(text, number), pane);
                for size in [SMALL, LARGE] {
                    let buffer = drawn(size, &state, Theme::Colours);
                    let is_control = |symbol: &str| symbol.contains(char::is_control);
                    assert!(
                        !buffer.content().iter().any(|cell| is_control(cell.symbol())),
                        "{text:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn an_empty_state_can_be_drawn() {
    let mut state = State::new(String::new());
    for pane in ["1", "2", "3", "4", "5"] {
        state = pressed(state, &format!("{pane}jkgGf"));
        [SMALL, LARGE].iter().for_each(|size| drop(drawn(*size, &state, Theme::Plain)));
    }
    state.handle(Time(0), Input::Status(Box::default()));
    [SMALL, LARGE].iter().for_each(|size| drop(drawn(*size, &state, Theme::Plain)));
}
