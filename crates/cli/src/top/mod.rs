//! `baton top`: a dashboard on a terminal.
//!
//! [`state`] is everything that is shown and decides what a key asks for; [`draw`] makes a frame of it. Both are pure.
//! Here are the terminal and the tasks that ask the coordinator.

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
    state::{Input, State, Wish},
    theme::Theme,
};
use crate::{
    connect::{Coordinator, Where},
    failure::{bad_input, failed},
    output,
};

/// Follow the job on a screen: curves, ranks, machines, cost, events and logs; with keys to steer it
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton top
  baton top --coordinator http://10.0.0.7:29600
  NO_COLOR=1 baton top

Keys: c checkpoint, p pause or resume, d drain (each asks first), Tab and 1-5 panes, arrows scroll, f the log of one \
rank, ? all keys, q leaves; the job goes on.")]
pub(crate) struct Args {
    #[command(flatten)]
    place: Where,
}

/// Between two questions for the status, and between two tries to reach a coordinator.
const LOOK: Duration = Duration::from_secs(1);
/// Between two frames, but for one that a key asks for.
const FRAME: Duration = Duration::from_millis(100);
/// Lines of the past to begin with.
const TAIL: u32 = 500;
/// Inputs that wait to be shown. A coordinator that tells more has to wait too.
const WAITING: usize = 1_024;

/// Follows the job until the user leaves.
pub(crate) async fn run(args: Args) -> Result<(), Failure> {
    if !output::is_terminal() || !io::stdin().is_terminal() {
        return Err(bad_input(
            "baton top needs a terminal; `baton status --watch` and `baton watch` need none",
        ));
    }
    let mut coordinator = Coordinator::find(&args.place)?;
    // One that has never answered is not waited for.
    let status = coordinator.status().await?;
    let (queue, inputs) = mpsc::channel(WAITING);
    signals(&queue)?;
    tokio::spawn(statuses(coordinator.clone(), queue.clone()));
    tokio::spawn(events(coordinator.clone(), queue.clone()));
    tokio::spawn(points(coordinator.clone(), queue.clone()));
    tokio::spawn(lines(coordinator.clone(), queue.clone()));
    let mut state = State::new(coordinator.url().to_owned());
    state.handle(Time(0), Input::Status(Box::new(status)));
    // Begun first: from here on a panic, too, gives the terminal back.
    let terminal = ratatui::try_init();
    let shown = match terminal {
        Ok(terminal) => {
            keys(queue.clone());
            show(terminal, state, &coordinator, &queue, inputs).await
        }
        Err(error) => Err(error),
    };
    let restored = ratatui::try_restore();
    shown.and(restored).map_err(|error| failed(format!("the terminal fails: {error}")))
}

/// Draws what comes, and asks for what the user wants, until the user leaves.
async fn show(
    mut terminal: DefaultTerminal,
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
        let is_due = tokio::time::timeout_at(next_frame, inputs.recv_many(&mut batch, WAITING));
        let waited = is_due.await;
        // Where much is told, the wait never ends by its time.
        let mut is_urgent = waited.is_err() || Instant::now() >= next_frame;
        let now = Time(u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX));
        for input in batch.drain(..) {
            is_urgent |= matches!(input, Input::Key(_) | Input::Resized | Input::Answer(_));
            if matches!(input, Input::Resized) {
                // Some terminals move what was drawn; everything is drawn anew.
                let size = terminal.size()?;
                terminal.resize(Rect::from((Position::ORIGIN, size)))?;
            }
            match state.handle(now, input) {
                Some(Wish::Quit) => return Ok(()),
                Some(wish) => drop(tokio::spawn(ask(coordinator.clone(), wish, queue.clone()))),
                None => {}
            }
        }
        if is_urgent {
            state.handle(now, Input::Tick);
            terminal.draw(|frame| draw::draw(frame, &state, theme))?;
            next_frame = Instant::now() + FRAME;
        }
    }
}

/// Does what the user wants.
async fn ask(mut coordinator: Coordinator, wish: Wish, queue: Sender<Input>) {
    let reason = || "`baton top`".to_owned();
    let answer = match wish {
        Wish::Quit => Ok(()),
        Wish::Checkpoint => coordinator.trigger_checkpoint().await,
        Wish::Drain => coordinator.drain(reason()).await,
        Wish::Pause => coordinator.pause(reason()).await,
        Wish::Resume => coordinator.resume().await,
    };
    let answer = answer.map(|()| wish.begun()).map_err(|failure| failure.message);
    let _ = queue.send(Input::Answer(answer)).await;
}

async fn statuses(mut coordinator: Coordinator, queue: Sender<Input>) {
    loop {
        let input = match coordinator.status().await {
            Ok(status) => Input::Status(Box::new(status)),
            Err(failure) => Input::Silence(failure.message),
        };
        if queue.send(input).await.is_err() {
            return;
        }
        tokio::time::sleep(LOOK).await;
    }
}

async fn events(coordinator: Coordinator, queue: Sender<Input>) {
    let mut events = coordinator.events(0);
    while !queue.is_closed() {
        match events.next(Duration::ZERO).await {
            Ok(event) => drop(queue.send(Input::Event(event)).await),
            // The status tells why there is no answer.
            Err(_) => tokio::time::sleep(LOOK).await,
        }
    }
}

async fn points(coordinator: Coordinator, queue: Sender<Input>) {
    let mut points = coordinator.metrics(true);
    while !queue.is_closed() {
        match points.next(Duration::ZERO).await {
            Ok(point) => drop(queue.send(Input::Point(point)).await),
            Err(_) => tokio::time::sleep(LOOK).await,
        }
    }
}

async fn lines(coordinator: Coordinator, queue: Sender<Input>) {
    let mut lines = coordinator.logs(StreamLogsRequest {
        ranks: Vec::new(),
        all_sources: true,
        tail: TAIL,
        follow: true,
    });
    while !queue.is_closed() {
        match lines.next(Duration::ZERO).await {
            Ok(line) => drop(queue.send(Input::Line(line)).await),
            Err(_) => tokio::time::sleep(LOOK).await,
        }
    }
}

/// Reads the keyboard on a thread of its own, which ends with the process.
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
        // Without a keyboard nobody could ever leave.
        let _ = queue.blocking_send(Input::Quit);
    });
}

/// Signals that ask a process to end; Ctrl-C is a key here.
fn signals(queue: &Sender<Input>) -> Result<(), Failure> {
    for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
        let mut signals =
            signal(kind).map_err(|error| failed(format!("cannot listen to signals: {error}")))?;
        let queue = queue.clone();
        tokio::spawn(async move {
            if signals.recv().await.is_some() {
                let _ = queue.send(Input::Quit).await;
            }
        });
    }
    Ok(())
}
