//! State of the dashboard. Pure: it takes inputs (statuses, events, keys) and returns the user's requests.

use std::{collections::VecDeque, time::Duration};

use baton_job::Time;
use baton_proto::v1::{
    GetStatusResponse, StreamLogsResponse, StreamMetricsResponse, WatchEventsResponse,
    get_status_response::Phase,
};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::curves::Curves;

/// An input of the dashboard.
#[derive(Debug)]
pub(super) enum Input {
    /// The job's status.
    Status(Box<GetStatusResponse>),
    /// The coordinator did not answer, with the error.
    NoAnswer(String),
    /// An event of the job.
    Event(WatchEventsResponse),
    /// Metrics of a step or an evaluation.
    Point(StreamMetricsResponse),
    /// A log line.
    Line(StreamLogsResponse),
    /// The user pressed a key.
    Key(KeyEvent),
    /// Result of a request of the user.
    Answer(Result<&'static str, String>),
    /// The terminal was resized.
    Resized,
    /// Time has passed.
    Tick,
    /// The keyboard is gone, or a signal asks the process to end.
    Quit,
}

/// A request of the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UserAction {
    /// Quit the dashboard; the job continues.
    Quit,
    /// Save a checkpoint after the current step.
    Checkpoint,
    /// Save and stop.
    Drain,
    /// Pause training.
    Pause,
    /// Resume training.
    Resume,
}

impl UserAction {
    /// The question that asks for confirmation.
    pub(super) fn question(self) -> &'static str {
        match self {
            Self::Quit => "Quit?",
            Self::Checkpoint => "Save a checkpoint after the current step, and continue?",
            Self::Drain => "Save after the current step and stop? The same `baton up` resumes.",
            Self::Pause => "Pause after the current step? Machines keep running and cost money.",
            Self::Resume => "Resume training?",
        }
    }

    /// The message after the coordinator has accepted the request.
    pub(super) fn confirmation(self) -> &'static str {
        match self {
            Self::Quit => "",
            Self::Checkpoint => "saving after the current step",
            Self::Drain => "saving after the current step, then stopping",
            Self::Pause => "pausing after the current step",
            Self::Resume => "training resumes",
        }
    }
}

/// A part of the screen, selected by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pane {
    Curves,
    Ranks,
    Machines,
    Job,
    Log,
}

impl Pane {
    pub(super) const ALL: [Self; 5] =
        [Self::Curves, Self::Ranks, Self::Machines, Self::Job, Self::Log];

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Curves => "1 Curves",
            Self::Ranks => "2 Ranks",
            Self::Machines => "3 Machines",
            Self::Job => "4 Job",
            Self::Log => "5 Log",
        }
    }

    fn index(self) -> usize {
        self as usize
    }

    fn moved(self, by: usize) -> Self {
        Self::ALL[(self.index() + by) % Self::ALL.len()]
    }
}

/// Everything that the dashboard shows.
#[derive(Debug)]
pub(super) struct State {
    /// URL of the coordinator.
    pub(super) address: String,
    pub(super) now: Time,
    /// The last status, and the time when it was received.
    pub(super) status: Option<(Time, GetStatusResponse)>,
    /// Error of the last status call, if it failed.
    pub(super) status_error: Option<String>,
    pub(super) curves: Curves,
    /// Oldest first.
    pub(super) events: VecDeque<WatchEventsResponse>,
    /// Oldest first.
    pub(super) lines: VecDeque<StreamLogsResponse>,
    pub(super) pane: Pane,
    /// Index of the selected rank in the list of ranks.
    pub(super) selected: usize,
    /// Whether the log shows only the selected rank.
    pub(super) one_rank: bool,
    /// Number of rows scrolled away: above in the panes, below in the log.
    pub(super) scrolled: [usize; Pane::ALL.len()],
    /// The action that waits for confirmation.
    pub(super) question: Option<UserAction>,
    pub(super) help: bool,
    /// Result of the last request of the user, and the time when it was received.
    pub(super) answer: Option<(Time, Result<&'static str, String>)>,
}

/// Maximum number of log lines, and of events, that are kept.
const MAX_KEPT: usize = 2_000;
/// Time for which an answer is shown.
const ANSWER_SHOWN_FOR: Duration = Duration::from_secs(10);
/// Age from which a status is stale; it is polled every second.
const STATUS_STALE_AFTER: Duration = Duration::from_secs(3);
/// Number of rows that a page key scrolls.
const PAGE_ROWS: usize = 10;

impl State {
    pub(super) fn new(address: String) -> Self {
        Self {
            address,
            now: Time(0),
            status: None,
            status_error: None,
            curves: Curves::default(),
            events: VecDeque::new(),
            lines: VecDeque::new(),
            pane: Pane::Curves,
            selected: 0,
            one_rank: false,
            scrolled: [0; Pane::ALL.len()],
            question: None,
            help: false,
            answer: None,
        }
    }

    /// Handles an input and returns a request of the user, if there is one.
    pub(super) fn handle(&mut self, now: Time, input: Input) -> Option<UserAction> {
        self.now = now;
        match input {
            Input::Status(status) => {
                self.selected = self.selected.min(status.ranks.len().saturating_sub(1));
                self.status = Some((now, *status));
                self.status_error = None;
            }
            Input::NoAnswer(error) => self.status_error = Some(error),
            Input::Event(event) => push(&mut self.events, event),
            Input::Point(point) => self.curves.add(&point),
            Input::Line(line) => self.add_line(line),
            Input::Key(key) if key.kind != KeyEventKind::Release => return self.press(key),
            Input::Answer(answer) => self.answer = Some((now, answer)),
            Input::Key(_) | Input::Resized | Input::Tick => {}
            Input::Quit => return Some(UserAction::Quit),
        }
        None
    }

    /// The last status.
    pub(super) fn job(&self) -> Option<&GetStatusResponse> {
        self.status.as_ref().map(|(_, status)| status)
    }

    /// Time since the last status, if it is stale or the last call failed.
    pub(super) fn no_answer_for(&self) -> Option<Duration> {
        let since = self.status.as_ref().map_or(Time(0), |(at, _)| *at);
        let age = self.now.since(since);
        (self.status_error.is_some() || age >= STATUS_STALE_AFTER).then_some(age)
    }

    /// The result of the last request, while it is recent.
    pub(super) fn recent_answer(&self) -> Option<&Result<&'static str, String>> {
        let (at, answer) = self.answer.as_ref()?;
        (self.now.since(*at) < ANSWER_SHOWN_FOR).then_some(answer)
    }

    /// The rank that is selected in the list.
    pub(super) fn selected_rank(&self) -> Option<u32> {
        Some(self.job()?.ranks.get(self.selected)?.rank)
    }

    /// The lines that the log shows, oldest first.
    pub(super) fn shown_lines(&self) -> impl DoubleEndedIterator<Item = &StreamLogsResponse> {
        let rank = self.selected_rank().filter(|_| self.one_rank);
        self.lines.iter().filter(move |line| rank.is_none() || line.rank == rank)
    }

    fn add_line(&mut self, line: StreamLogsResponse) {
        let rank = self.selected_rank().filter(|_| self.one_rank);
        let is_shown = rank.is_none() || line.rank == rank;
        // If the user has scrolled up, the lines shown stay in place.
        let scrolled = &mut self.scrolled[Pane::Log.index()];
        if is_shown && *scrolled > 0 {
            *scrolled = (*scrolled + 1).min(MAX_KEPT);
        }
        push(&mut self.lines, line);
    }

    fn press(&mut self, key: KeyEvent) -> Option<UserAction> {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control && matches!(key.code, KeyCode::Char('c' | 'd' | 'q')) {
            return Some(UserAction::Quit);
        }
        if let Some(action) = self.question {
            return self.answer_question(action, key.code);
        }
        if self.help {
            self.help = false;
            return None;
        }
        match key.code {
            KeyCode::Char('q') => return Some(UserAction::Quit),
            KeyCode::Char('?' | 'h') => self.help = true,
            KeyCode::Char('c') => self.ask(UserAction::Checkpoint),
            KeyCode::Char('d') => self.ask(UserAction::Drain),
            KeyCode::Char('p') => {
                let paused = self.job().is_some_and(|status| status.phase() == Phase::Paused);
                self.ask(if paused { UserAction::Resume } else { UserAction::Pause });
            }
            KeyCode::Char('f') | KeyCode::Enter => {
                self.one_rank = !self.one_rank;
                self.scrolled[Pane::Log.index()] = 0;
            }
            KeyCode::Tab | KeyCode::Right => self.pane = self.pane.moved(1),
            KeyCode::BackTab | KeyCode::Left => self.pane = self.pane.moved(Pane::ALL.len() - 1),
            KeyCode::Char(digit @ '1'..='5') => {
                self.pane = Pane::ALL[digit as usize - '1' as usize];
            }
            KeyCode::Up | KeyCode::Char('k') => self.scroll(Direction::Up, 1),
            KeyCode::Down | KeyCode::Char('j') => self.scroll(Direction::Down, 1),
            KeyCode::PageUp => self.scroll(Direction::Up, PAGE_ROWS),
            KeyCode::PageDown => self.scroll(Direction::Down, PAGE_ROWS),
            KeyCode::Home | KeyCode::Char('g') => self.scroll(Direction::Up, usize::MAX),
            KeyCode::End | KeyCode::Char('G') => self.scroll(Direction::Down, usize::MAX),
            _ => {}
        }
        None
    }

    /// Asks the user to confirm an action that changes the job.
    fn ask(&mut self, action: UserAction) {
        match self.job() {
            Some(status) if status.outcome.is_some() => {
                self.answer = Some((self.now, Err("the job has ended".to_owned())));
            }
            Some(status) if status.phase() != Phase::Idle => self.question = Some(action),
            _ => self.answer = Some((self.now, Err("there is no job".to_owned()))),
        }
    }

    fn answer_question(&mut self, action: UserAction, key: KeyCode) -> Option<UserAction> {
        match key {
            KeyCode::Char('y' | 'Y') => {
                self.question = None;
                self.answer = Some((self.now, Ok("sending the request to the coordinator")));
                Some(action)
            }
            KeyCode::Char('n' | 'N' | 'q') | KeyCode::Esc => {
                self.question = None;
                None
            }
            _ => None,
        }
    }

    fn scroll(&mut self, direction: Direction, rows: usize) {
        let (ranks, nodes, recoveries) = self.job().map_or((0, 0, 0), |status| {
            (status.ranks.len(), status.nodes.len(), status.recoveries.len())
        });
        let pane = self.pane.index();
        let (position, max) = match self.pane {
            Pane::Curves => return,
            Pane::Ranks => (&mut self.selected, ranks.saturating_sub(1)),
            Pane::Machines => (&mut self.scrolled[pane], nodes.saturating_sub(1)),
            // Each recovery has at least one line, and there are other lines above them.
            Pane::Job => (&mut self.scrolled[pane], recoveries + JOB_LINES),
            Pane::Log => {
                let max = self.shown_lines().count().saturating_sub(1);
                (&mut self.scrolled[pane], max)
            }
        };
        // The log's position is counted from its end.
        let forward = (direction == Direction::Down) != (self.pane == Pane::Log);
        *position = if forward {
            position.saturating_add(rows).min(max)
        } else {
            position.saturating_sub(rows)
        };
    }
}

/// Approximate number of lines of the job's pane without the recoveries.
const JOB_LINES: usize = 12;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
}

/// Adds an item, and removes the oldest one if there are too many.
fn push<T>(kept: &mut VecDeque<T>, item: T) {
    if kept.len() == MAX_KEPT {
        kept.pop_front();
    }
    kept.push_back(item);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn state() -> State {
        let mut state = State::new("http://127.0.0.1:29600".to_owned());
        state.handle(Time(0), Input::Status(Box::new(testing::training())));
        state
    }

    fn press(state: &mut State, keys: &str) -> Vec<Option<UserAction>> {
        let key = |c| Input::Key(KeyEvent::from(KeyCode::Char(c)));
        keys.chars().map(|c| state.handle(Time(0), key(c))).collect()
    }

    #[test]
    fn no_request_is_sent_without_confirmation() {
        for (key, action) in
            [('c', UserAction::Checkpoint), ('d', UserAction::Drain), ('p', UserAction::Pause)]
        {
            let mut state = state();
            assert_eq!(press(&mut state, &key.to_string()), [None]);
            assert_eq!(state.question, Some(action));
            assert_eq!(press(&mut state, "cdpxjy"), [None, None, None, None, None, Some(action)]);
            assert_eq!(state.question, None);
            assert_eq!(press(&mut state, "y"), [None], "one confirmation is for one question");
        }
    }

    #[test]
    fn no_cancels() {
        for no in ["n", "N", "q"] {
            let mut state = state();
            assert_eq!(press(&mut state, &format!("d{no}y")), [None; 3]);
        }
        let mut state = state();
        press(&mut state, "d");
        state.handle(Time(0), Input::Key(KeyEvent::from(KeyCode::Esc)));
        assert_eq!(state.question, None);
    }

    #[test]
    fn a_paused_job_is_resumed_by_the_same_key() {
        let mut state = state();
        state.handle(Time(0), Input::Status(Box::new(testing::paused())));
        assert_eq!(press(&mut state, "py"), [None, Some(UserAction::Resume)]);
    }

    #[test]
    fn without_a_running_job_no_confirmation_is_asked() {
        for (status, why) in
            [(testing::completed(), "the job has ended"), (testing::idle(), "there is no job")]
        {
            let mut state = state();
            state.handle(Time(0), Input::Status(Box::new(status)));
            assert_eq!(press(&mut state, "dy"), [None, None]);
            assert_eq!(state.recent_answer(), Some(&Err(why.to_owned())));
        }
    }

    #[test]
    fn quitting_needs_no_confirmation() {
        assert_eq!(press(&mut state(), "q"), [Some(UserAction::Quit)]);
        let mut with_question = state();
        press(&mut with_question, "d");
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(with_question.handle(Time(0), Input::Key(control_c)), Some(UserAction::Quit));
    }

    #[test]
    fn panes_are_selected_by_number_and_in_turn() {
        let mut state = state();
        let tab = || Input::Key(KeyEvent::from(KeyCode::Tab));
        press(&mut state, "5");
        assert_eq!(state.pane, Pane::Log);
        state.handle(Time(0), tab());
        assert_eq!(state.pane, Pane::Curves);
        state.handle(Time(0), Input::Key(KeyEvent::from(KeyCode::BackTab)));
        assert_eq!(state.pane, Pane::Log);
    }

    #[test]
    fn scrolling_stays_within_the_content() {
        let mut state = state();
        press(&mut state, "2jjjjj");
        assert_eq!(state.selected_rank(), Some(2));
        press(&mut state, "kkkkkkk");
        assert_eq!(state.selected_rank(), Some(0));
        press(&mut state, "2G");
        let fewer = GetStatusResponse { ranks: vec![], ..testing::training() };
        state.handle(Time(0), Input::Status(Box::new(fewer)));
        assert_eq!((state.selected, state.selected_rank()), (0, None));
        press(&mut state, "3G4G5GkjkG1jkgG");
    }

    #[test]
    fn the_log_can_show_only_the_selected_rank_and_keeps_its_position() {
        let mut state = state();
        testing::lines().into_iter().for_each(|line| {
            state.handle(Time(0), Input::Line(line));
        });
        assert_eq!(state.shown_lines().count(), 6);
        press(&mut state, "2jf");
        let shown: Vec<&str> = state.shown_lines().map(|line| line.line.as_str()).collect();
        assert_eq!(shown, ["restored in 0.1 s"]);
        press(&mut state, "f5kk");
        state.handle(Time(0), Input::Line(testing::lines().remove(0)));
        assert_eq!(state.scrolled[Pane::Log.index()], 3);
        press(&mut state, "G");
        assert_eq!(state.scrolled[Pane::Log.index()], 0);
    }

    #[test]
    fn a_missing_answer_is_shown_until_the_next_answer() {
        let mut state = state();
        state.handle(Time(2_000), Input::Tick);
        assert_eq!(state.no_answer_for(), None);
        state.handle(Time(12_000), Input::NoAnswer("nothing answers".to_owned()));
        assert_eq!(state.no_answer_for(), Some(Duration::from_secs(12)));
        state.handle(Time(13_000), Input::Status(Box::new(testing::training())));
        assert_eq!(state.no_answer_for(), None);
    }

    #[test]
    fn answers_are_shown_for_a_while() {
        let mut state = state();
        state.handle(Time(0), Input::Answer(Ok("training resumes")));
        assert!(state.recent_answer().is_some());
        state.handle(Time(10_000), Input::Tick);
        assert_eq!(state.recent_answer(), None);
    }

    #[test]
    fn the_number_of_kept_lines_is_limited() {
        let mut state = state();
        for _ in 0..MAX_KEPT + 5 {
            state.handle(Time(0), Input::Line(StreamLogsResponse::default()));
        }
        assert_eq!(state.lines.len(), MAX_KEPT);
    }
}
