//! What the dashboard knows and shows. Pure: what is told and which keys are pressed goes in, what the user wants
//! comes out.

use std::{collections::VecDeque, time::Duration};

use baton_job::Time;
use baton_proto::v1::{
    GetStatusResponse, StreamLogsResponse, StreamMetricsResponse, WatchEventsResponse,
    get_status_response::Phase,
};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::curves::Curves;

/// What reaches the dashboard.
#[derive(Debug)]
pub(super) enum Input {
    /// The job's status.
    Status(Box<GetStatusResponse>),
    /// The coordinator gave no answer; why.
    Silence(String),
    /// Something happened in the job.
    Event(WatchEventsResponse),
    /// Numbers of an update or an evaluation.
    Point(StreamMetricsResponse),
    /// A line that was logged.
    Line(StreamLogsResponse),
    /// The user pressed a key.
    Key(KeyEvent),
    /// How it went with what the user wanted.
    Answer(Result<&'static str, String>),
    /// The terminal has another size.
    Resized,
    /// Time has passed.
    Tick,
    /// The terminal or the system wants this to end.
    Quit,
}

/// What the user wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// To leave the dashboard; the job goes on.
    Quit,
    /// A checkpoint after the current step.
    Checkpoint,
    /// To save and stop.
    Drain,
    /// To stand still.
    Pause,
    /// To go on.
    Resume,
}

impl Wish {
    /// What it would do to the job, as a question.
    pub(super) fn question(self) -> &'static str {
        match self {
            Self::Quit => "Leave?",
            Self::Checkpoint => "Save a checkpoint after the current step, and go on?",
            Self::Drain => "Save after the current step and stop? The same `baton up` goes on.",
            Self::Pause => "Stand still after the current step? Machines stay, and are paid for.",
            Self::Resume => "Let training go on?",
        }
    }

    /// What was begun, once the coordinator agreed.
    pub(super) fn begun(self) -> &'static str {
        match self {
            Self::Quit => "",
            Self::Checkpoint => "saving after the current step",
            Self::Drain => "saving after the current step, then stopping",
            Self::Pause => "standing still after the current step",
            Self::Resume => "training goes on",
        }
    }
}

/// A part of the screen that is chosen by its number.
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

    fn place(self) -> usize {
        self as usize
    }

    fn moved(self, by: usize) -> Self {
        Self::ALL[(self.place() + by) % Self::ALL.len()]
    }
}

/// Everything that is shown.
#[derive(Debug)]
pub(super) struct State {
    /// Where the coordinator serves.
    pub(super) address: String,
    pub(super) now: Time,
    /// The last status, and when it came.
    pub(super) status: Option<(Time, GetStatusResponse)>,
    /// Why the last question for it had no answer.
    pub(super) silence: Option<String>,
    pub(super) curves: Curves,
    /// Oldest first.
    pub(super) events: VecDeque<WatchEventsResponse>,
    /// Oldest first.
    pub(super) lines: VecDeque<StreamLogsResponse>,
    pub(super) pane: Pane,
    /// The place in the list of ranks of the one chosen.
    pub(super) chosen: usize,
    /// Whether the log is of that rank alone.
    pub(super) one_rank: bool,
    /// Rows that are scrolled away: above in the panes, below in the log.
    pub(super) scrolled: [usize; Pane::ALL.len()],
    /// What waits for a yes.
    pub(super) question: Option<Wish>,
    pub(super) help: bool,
    /// How it went with what the user wanted, and when that came.
    pub(super) answer: Option<(Time, Result<&'static str, String>)>,
}

/// Lines and events that are kept.
const KEPT: usize = 2_000;
/// How long an answer is shown.
const ANSWER_SHOWN: Duration = Duration::from_secs(10);
/// A status is asked for every second; without one for so long, something is wrong.
const SILENT: Duration = Duration::from_secs(3);
/// Rows that a page key moves.
const PAGE: usize = 10;

impl State {
    pub(super) fn new(address: String) -> Self {
        Self {
            address,
            now: Time(0),
            status: None,
            silence: None,
            curves: Curves::default(),
            events: VecDeque::new(),
            lines: VecDeque::new(),
            pane: Pane::Curves,
            chosen: 0,
            one_rank: false,
            scrolled: [0; Pane::ALL.len()],
            question: None,
            help: false,
            answer: None,
        }
    }

    /// Takes in what came; what the user wants to be done.
    pub(super) fn handle(&mut self, now: Time, input: Input) -> Option<Wish> {
        self.now = now;
        match input {
            Input::Status(status) => {
                self.chosen = self.chosen.min(status.ranks.len().saturating_sub(1));
                self.status = Some((now, *status));
                self.silence = None;
            }
            Input::Silence(why) => self.silence = Some(why),
            Input::Event(event) => push(&mut self.events, event),
            Input::Point(point) => self.curves.add(&point),
            Input::Line(line) => self.add_line(line),
            Input::Key(key) if key.kind != KeyEventKind::Release => return self.press(key),
            Input::Answer(answer) => self.answer = Some((now, answer)),
            Input::Key(_) | Input::Resized | Input::Tick => {}
            Input::Quit => return Some(Wish::Quit),
        }
        None
    }

    /// The last status.
    pub(super) fn job(&self) -> Option<&GetStatusResponse> {
        self.status.as_ref().map(|(_, status)| status)
    }

    /// For how long there has been no answer, if that is worth telling.
    pub(super) fn silent_for(&self) -> Option<Duration> {
        let since = self.status.as_ref().map_or(Time(0), |(at, _)| *at);
        let silent = self.now.since(since);
        (self.silence.is_some() || silent >= SILENT).then_some(silent)
    }

    /// The answer to the last wish, while it is news.
    pub(super) fn fresh_answer(&self) -> Option<&Result<&'static str, String>> {
        let (at, answer) = self.answer.as_ref()?;
        (self.now.since(*at) < ANSWER_SHOWN).then_some(answer)
    }

    /// The rank that is chosen in the list.
    pub(super) fn chosen_rank(&self) -> Option<u32> {
        Some(self.job()?.ranks.get(self.chosen)?.rank)
    }

    /// The lines that the log shows, oldest first.
    pub(super) fn shown_lines(&self) -> impl DoubleEndedIterator<Item = &StreamLogsResponse> {
        let rank = self.chosen_rank().filter(|_| self.one_rank);
        self.lines.iter().filter(move |line| rank.is_none() || line.rank == rank)
    }

    fn add_line(&mut self, line: StreamLogsResponse) {
        let rank = self.chosen_rank().filter(|_| self.one_rank);
        let is_shown = rank.is_none() || line.rank == rank;
        // Who reads what is further up wants it to stay where it is.
        let scrolled = &mut self.scrolled[Pane::Log.place()];
        if is_shown && *scrolled > 0 {
            *scrolled = (*scrolled + 1).min(KEPT);
        }
        push(&mut self.lines, line);
    }

    fn press(&mut self, key: KeyEvent) -> Option<Wish> {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control && matches!(key.code, KeyCode::Char('c' | 'd' | 'q')) {
            return Some(Wish::Quit);
        }
        if let Some(wish) = self.question {
            return self.answer_question(wish, key.code);
        }
        if self.help {
            self.help = false;
            return None;
        }
        match key.code {
            KeyCode::Char('q') => return Some(Wish::Quit),
            KeyCode::Char('?' | 'h') => self.help = true,
            KeyCode::Char('c') => self.ask(Wish::Checkpoint),
            KeyCode::Char('d') => self.ask(Wish::Drain),
            KeyCode::Char('p') => {
                let paused = self.job().is_some_and(|status| status.phase() == Phase::Paused);
                self.ask(if paused { Wish::Resume } else { Wish::Pause });
            }
            KeyCode::Char('f') | KeyCode::Enter => {
                self.one_rank = !self.one_rank;
                self.scrolled[Pane::Log.place()] = 0;
            }
            KeyCode::Tab | KeyCode::Right => self.pane = self.pane.moved(1),
            KeyCode::BackTab | KeyCode::Left => self.pane = self.pane.moved(Pane::ALL.len() - 1),
            KeyCode::Char(digit @ '1'..='5') => {
                self.pane = Pane::ALL[digit as usize - '1' as usize];
            }
            KeyCode::Up | KeyCode::Char('k') => self.scroll(Way::Up, 1),
            KeyCode::Down | KeyCode::Char('j') => self.scroll(Way::Down, 1),
            KeyCode::PageUp => self.scroll(Way::Up, PAGE),
            KeyCode::PageDown => self.scroll(Way::Down, PAGE),
            KeyCode::Home | KeyCode::Char('g') => self.scroll(Way::Up, usize::MAX),
            KeyCode::End | KeyCode::Char('G') => self.scroll(Way::Down, usize::MAX),
            _ => {}
        }
        None
    }

    /// Nothing is done to a job without a yes.
    fn ask(&mut self, wish: Wish) {
        match self.job() {
            Some(status) if status.outcome.is_some() => {
                self.answer = Some((self.now, Err("the job is over".to_owned())));
            }
            Some(status) if status.phase() != Phase::Idle => self.question = Some(wish),
            _ => self.answer = Some((self.now, Err("there is no job".to_owned()))),
        }
    }

    fn answer_question(&mut self, wish: Wish, key: KeyCode) -> Option<Wish> {
        match key {
            KeyCode::Char('y' | 'Y') => {
                self.question = None;
                self.answer = Some((self.now, Ok("asking the coordinator")));
                Some(wish)
            }
            KeyCode::Char('n' | 'N' | 'q') | KeyCode::Esc => {
                self.question = None;
                None
            }
            _ => None,
        }
    }

    fn scroll(&mut self, way: Way, rows: usize) {
        let (ranks, nodes, recoveries) = self.job().map_or((0, 0, 0), |status| {
            (status.ranks.len(), status.nodes.len(), status.recoveries.len())
        });
        let place = self.pane.place();
        let (at, most) = match self.pane {
            Pane::Curves => return,
            Pane::Ranks => (&mut self.chosen, ranks.saturating_sub(1)),
            Pane::Machines => (&mut self.scrolled[place], nodes.saturating_sub(1)),
            // Each recovery has a line, and what stands above them has some.
            Pane::Job => (&mut self.scrolled[place], recoveries + JOB_LINES),
            Pane::Log => {
                let most = self.shown_lines().count().saturating_sub(1);
                (&mut self.scrolled[place], most)
            }
        };
        // The log is counted from its end.
        let forward = (way == Way::Down) != (self.pane == Pane::Log);
        *at = if forward { at.saturating_add(rows).min(most) } else { at.saturating_sub(rows) };
    }
}

/// Lines of the job's pane besides the recoveries, about.
const JOB_LINES: usize = 12;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Up,
    Down,
}

/// Adds to what is kept.
fn push<T>(kept: &mut VecDeque<T>, item: T) {
    if kept.len() == KEPT {
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

    fn press(state: &mut State, keys: &str) -> Vec<Option<Wish>> {
        let key = |c| Input::Key(KeyEvent::from(KeyCode::Char(c)));
        keys.chars().map(|c| state.handle(Time(0), key(c))).collect()
    }

    #[test]
    fn nothing_is_asked_for_without_a_yes() {
        for (key, wish) in [('c', Wish::Checkpoint), ('d', Wish::Drain), ('p', Wish::Pause)] {
            let mut state = state();
            assert_eq!(press(&mut state, &key.to_string()), [None]);
            assert_eq!(state.question, Some(wish));
            assert_eq!(press(&mut state, "cdpxjy"), [None, None, None, None, None, Some(wish)]);
            assert_eq!(state.question, None);
            assert_eq!(press(&mut state, "y"), [None], "one yes is for one question");
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
        assert_eq!(press(&mut state, "py"), [None, Some(Wish::Resume)]);
    }

    #[test]
    fn where_there_is_nothing_to_steer_nothing_is_asked() {
        for (status, why) in
            [(testing::completed(), "the job is over"), (testing::idle(), "there is no job")]
        {
            let mut state = state();
            state.handle(Time(0), Input::Status(Box::new(status)));
            assert_eq!(press(&mut state, "dy"), [None, None]);
            assert_eq!(state.fresh_answer(), Some(&Err(why.to_owned())));
        }
    }

    #[test]
    fn leaving_needs_no_yes() {
        assert_eq!(press(&mut state(), "q"), [Some(Wish::Quit)]);
        let mut asked = state();
        press(&mut asked, "d");
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(asked.handle(Time(0), Input::Key(control_c)), Some(Wish::Quit));
    }

    #[test]
    fn panes_are_chosen_by_number_and_in_turn() {
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
    fn scrolling_stays_within_what_there_is() {
        let mut state = state();
        press(&mut state, "2jjjjj");
        assert_eq!(state.chosen_rank(), Some(2));
        press(&mut state, "kkkkkkk");
        assert_eq!(state.chosen_rank(), Some(0));
        press(&mut state, "2G");
        let fewer = GetStatusResponse { ranks: vec![], ..testing::training() };
        state.handle(Time(0), Input::Status(Box::new(fewer)));
        assert_eq!((state.chosen, state.chosen_rank()), (0, None));
        press(&mut state, "3G4G5GkjkG1jkgG");
    }

    #[test]
    fn the_log_is_of_the_chosen_rank_if_so_wished_and_stays_where_it_is_read() {
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
        assert_eq!(state.scrolled[Pane::Log.place()], 3);
        press(&mut state, "G");
        assert_eq!(state.scrolled[Pane::Log.place()], 0);
    }

    #[test]
    fn silence_is_told_until_the_next_answer() {
        let mut state = state();
        state.handle(Time(2_000), Input::Tick);
        assert_eq!(state.silent_for(), None);
        state.handle(Time(12_000), Input::Silence("nothing answers".to_owned()));
        assert_eq!(state.silent_for(), Some(Duration::from_secs(12)));
        state.handle(Time(13_000), Input::Status(Box::new(testing::training())));
        assert_eq!(state.silent_for(), None);
    }

    #[test]
    fn answers_are_news_for_a_while() {
        let mut state = state();
        state.handle(Time(0), Input::Answer(Ok("training goes on")));
        assert!(state.fresh_answer().is_some());
        state.handle(Time(10_000), Input::Tick);
        assert_eq!(state.fresh_answer(), None);
    }

    #[test]
    fn no_more_is_kept_than_can_be_read() {
        let mut state = state();
        for _ in 0..KEPT + 5 {
            state.handle(Time(0), Input::Line(StreamLogsResponse::default()));
        }
        assert_eq!(state.lines.len(), KEPT);
    }
}
