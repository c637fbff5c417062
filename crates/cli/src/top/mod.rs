//! `baton top`: a dashboard on a terminal.
//!
//! [`state`] is what the dashboard shows, and handles keys; [`draw`] draws a frame of it. Both are pure. This module
//! manages the terminal and the tasks that call the coordinator.

mod curves;
mod draw;
mod state;
mod theme;

use std::{
    io::{self, IsTerminal},
    thread,
    time::Duration,
};

use baton_job::{Time, exit::Failure};
use baton_proto::v1::StreamLogsRequest;
use ratatui::{
    DefaultTerminal,
    crossterm::event,
    layout::{Position, Rect},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc::{self, Receiver, Sender},
    time::Instant,
};

use self::{
    state::{Input, State, UserAction},
    theme::Theme,
};
use crate::{
    connect::{Coordinator, CoordinatorFlags, Feed, Follow},
    failure::{bad_input, failed},
    output,
};

/// Show a live dashboard of the job: curves, ranks, machines, cost, events and logs; with keys to control the job
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton top
  baton top --coordinator http://10.0.0.7:29600
  NO_COLOR=1 baton top

Keys: c checkpoint, p pause or resume, d drain (each asks for confirmation), Tab and 1-5 panes, arrows scroll, f log of \
one rank, ? all keys, q quits; the job continues.")]
pub(crate) struct Args {
    #[command(flatten)]
    target: CoordinatorFlags,
}

/// Poll interval of the job's status, and retry interval of calls.
const STATUS_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum time between two frames; a key press draws one immediately.
const FRAME_INTERVAL: Duration = Duration::from_millis(100);
/// Number of past log lines to load at the start.
const INITIAL_LOG_LINES: u32 = 500;
/// Capacity of the input queue. A full queue slows down the streams from the coordinator.
const QUEUE_CAPACITY: usize = 1_024;

/// Shows the dashboard until the user quits.
pub(crate) async fn run(args: Args) -> Result<(), Failure> {
    if !output::is_terminal() || !io::stdin().is_terminal() {
        return Err(bad_input(
            "baton top needs a terminal; `baton status --watch` and `baton watch` need none",
        ));
    }
    let mut coordinator = Coordinator::find(&args.target)?;
    // Fails at once if the coordinator does not answer now; later interruptions are retried.
    let status = coordinator.status().await?;
    let (queue, inputs) = mpsc::channel(QUEUE_CAPACITY);
    signals(&queue)?;
    tokio::spawn(statuses(coordinator.clone(), queue.clone()));
    tokio::spawn(follow(coordinator.events(), Input::Event, queue.clone()));
    tokio::spawn(follow(coordinator.metrics(true), Input::Point, queue.clone()));
    let lines = StreamLogsRequest {
        ranks: Vec::new(),
        all_sources: true,
        tail: INITIAL_LOG_LINES,
        follow: true,
    };
    tokio::spawn(follow(coordinator.logs(lines), Input::Line, queue.clone()));
    let mut state = State::new(coordinator.url().to_owned());
    state.handle(Time(0), Input::Status(Box::new(status)));
    // Initialized before reading keys. From here on, a panic restores the terminal too.
    let terminal = ratatui::try_init();
    let shown = match terminal {
        Ok(mut terminal) => {
            keys(queue.clone());
            let shown = show(&mut terminal, state, &coordinator, &queue, inputs).await;
            if terminal.show_cursor().is_err() {
                // The terminal is gone. Its drop would print that, and panic if standard error is gone too.
                std::mem::forget(terminal);
            }
            shown
        }
        Err(error) => Err(error),
    };
    let restored = ratatui::try_restore();
    shown.and(restored).map_err(|error| failed(format!("cannot use the terminal: {error}")))
}

/// Handles inputs, draws frames and sends requests until the user quits.
async fn show(
    terminal: &mut DefaultTerminal,
    mut state: State,
    coordinator: &Coordinator,
    queue: &Sender<Input>,
    mut inputs: Receiver<Input>,
) -> io::Result<()> {
    let theme = if output::is_colourful() { Theme::Colours } else { Theme::Plain };
    let start = Instant::now();
    let mut batch = Vec::new();
    let mut next_frame = Instant::now();
    loop {
        let received =
            tokio::time::timeout_at(next_frame, inputs.recv_many(&mut batch, QUEUE_CAPACITY));
        let received = received.await;
        // With many inputs, the wait never ends by its timeout.
        let mut draw_now = received.is_err() || Instant::now() >= next_frame;
        let now = Time(u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX));
        for input in batch.drain(..) {
            draw_now |= matches!(input, Input::Key(_) | Input::Resized | Input::Answer(_));
            if matches!(input, Input::Resized) {
                // Some terminals move what was drawn, so everything is drawn again.
                let size = terminal.size()?;
                terminal.resize(Rect::from((Position::ORIGIN, size)))?;
            }
            match state.handle(now, input) {
                Some(UserAction::Quit) => return Ok(()),
                Some(action) => {
                    drop(tokio::spawn(send(coordinator.clone(), action, queue.clone())));
                }
                None => {}
            }
        }
        if draw_now {
            state.handle(now, Input::Tick);
            terminal.draw(|frame| draw::draw(frame, &state, theme))?;
            next_frame = Instant::now() + FRAME_INTERVAL;
        }
    }
}

/// Sends a request of the user to the coordinator.
async fn send(mut coordinator: Coordinator, action: UserAction, queue: Sender<Input>) {
    let reason = || "`baton top`".to_owned();
    coordinator.find_again().await;
    let answer = match action {
        UserAction::Quit => Ok(()),
        UserAction::Checkpoint => coordinator.trigger_checkpoint().await,
        UserAction::Drain => coordinator.drain(reason()).await,
        UserAction::Pause => coordinator.pause(reason()).await,
        UserAction::Resume => coordinator.resume().await,
    };
    let answer = answer.map(|()| action.confirmation()).map_err(|failure| failure.message);
    let _ = queue.send(Input::Answer(answer)).await;
}

/// Polls the job's status.
async fn statuses(mut coordinator: Coordinator, queue: Sender<Input>) {
    loop {
        let input = match coordinator.status().await {
            Ok(status) => Input::Status(Box::new(status)),
            Err(failure) => Input::NoAnswer(failure.message),
        };
        if queue.send(input).await.is_err() {
            return;
        }
        tokio::time::sleep(STATUS_POLL_INTERVAL).await;
    }
}

/// Sends the items of a feed to the queue until the queue is closed.
async fn follow<F: Feed>(mut feed: Follow<F>, input: fn(F::Item) -> Input, queue: Sender<Input>) {
    while !queue.is_closed() {
        match feed.next(Duration::ZERO).await {
            Ok(item) => drop(queue.send(input(item)).await),
            // The status task reports the error.
            Err(_) => tokio::time::sleep(STATUS_POLL_INTERVAL).await,
        }
    }
}

/// Reads the keyboard on a separate thread, which ends with the process.
fn keys(queue: Sender<Input>) {
    thread::spawn(move || {
        while let Ok(event) = event::read() {
            let input = match event {
                event::Event::Key(key) => Input::Key(key),
                event::Event::Resize(..) => Input::Resized,
                _ => Input::Tick,
            };
            if queue.blocking_send(input).is_err() {
                return;
            }
        }
        // Without a keyboard, the user could not quit.
        let _ = queue.blocking_send(Input::Quit);
    });
}

/// Quits on signals that ask a process to end. Ctrl-C is handled as a key.
fn signals(queue: &Sender<Input>) -> Result<(), Failure> {
    for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
        let mut signals =
            signal(kind).map_err(|error| failed(format!("cannot handle signals: {error}")))?;
        let queue = queue.clone();
        tokio::spawn(async move {
            if signals.recv().await.is_some() {
                let _ = queue.send(Input::Quit).await;
            }
        });
    }
    Ok(())
}
