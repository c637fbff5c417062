//! The header: the job, its phase and progress, and the most important message.

use baton_proto::v1::GetStatusResponse;
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::Style,
    text::{Line, Span},
};

use crate::{
    clean::clean,
    human,
    render::{self, Position},
    top::{state::State, theme::Theme},
};

/// Height of the header in rows.
pub(super) const HEIGHT: u16 = 4;

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme) {
    let rows = Layout::vertical([Constraint::Length(1); HEIGHT as usize]).areas::<4>(area);
    let right = connection(state, theme);
    let width = u16::try_from(right.width()).unwrap_or(u16::MAX).min(area.width / 2);
    let [left, right_area] =
        Layout::horizontal([Constraint::Min(0), Constraint::Length(width)]).areas(rows[0]);
    frame.render_widget(right, right_area);
    if let Some(status) = state.job() {
        frame.render_widget(progress(status, area.width, theme), rows[1]);
        frame.render_widget(numbers(status, area.width), rows[2]);
    }
    let job = job(state, theme);
    let is_cut = job.width() > usize::from(left.width);
    frame.render_widget(job, left);
    let reason = || state.job().filter(|_| is_cut).map(|job| (theme.dim(), job.reason.clone()));
    if let Some((style, text)) = message(state, theme).or_else(reason) {
        frame.render_widget(Line::styled(format!(" {}", clean(&text)), style), rows[3]);
    }
}

/// The job's name and phase.
fn job(state: &State, theme: Theme) -> Line<'static> {
    let Some(status) = state.job() else {
        return Line::styled(" baton", theme.bold());
    };
    let name = if status.name.is_empty() { "no job" } else { &status.name };
    let phase = render::phase_line(status, render::Paint::Plain);
    Line::from_iter([
        Span::styled(format!(" {}  ", clean(name)), theme.bold()),
        Span::styled(phase, theme.phase(status.phase())),
    ])
}

/// Generation, coordinator, and whether the coordinator answers.
fn connection(state: &State, theme: Theme) -> Line<'static> {
    let generation = state.job().map_or(0, |status| status.generation);
    let address = clean(state.address.trim_start_matches("http://")).into_owned();
    let connection = match state.no_answer_for() {
        Some(age) => {
            let seconds = age.as_secs();
            Span::styled(format!("○ no answer for {seconds} s "), theme.bad())
        }
        None => Span::styled("● live ", theme.good()),
    };
    let text = format!("  gen {generation}  {address}  ");
    Line::from_iter([Span::raw(text), connection]).right_aligned()
}

/// `epoch 5/16  step 101/352  ███░░░ 28.7 %  2 min 05 s left  32 px  batch 64`
fn progress(status: &GetStatusResponse, width: u16, theme: Theme) -> Line<'static> {
    let Some(step) = &status.latest else {
        return Line::styled(" no step yet", theme.dim());
    };
    let position = Position::new(step, status.epochs);
    let left = format!(
        " epoch {}/{}  step {}/{}  ",
        position.epoch, status.epochs, step.step, step.total_steps
    );
    let eta = status.eta_seconds.map(|eta| format!("  {} left", human::duration(eta)));
    let pixels = (step.resolution > 0).then(|| format!("  {} px", step.resolution));
    let right = format!(
        " {}{}{}  batch {}",
        human::percent(position.share),
        eta.unwrap_or_default(),
        pixels.unwrap_or_default(),
        step.global_batch
    );
    let taken = left.chars().count() + right.chars().count() + 1;
    let bar = render::bar(position.share, usize::from(width).saturating_sub(taken).clamp(4, 80));
    Line::from_iter([Span::raw(left), Span::styled(bar, theme.good()), Span::raw(right)])
}

/// The latest step and evaluation.
fn numbers(status: &GetStatusResponse, width: u16) -> Line<'static> {
    let mut parts = Vec::new();
    if let Some(step) = &status.latest {
        let unit = if step.resolution > 0 { "images" } else { "samples" };
        parts.push(format!("loss {:.4}", step.loss));
        parts.extend(step.named().iter().map(render::metric));
        parts.push(format!("lr {}", human::rate(step.lr)));
        parts.push(format!("{:.0} {unit}/s", step.samples_per_second));
        parts.push(format!("wait {}", human::percent(step.loader_wait)));
    }
    let score = |evaluated: &baton_proto::v1::EvaluatedStep| {
        evaluated.accuracy.as_ref().map(render::score).unwrap_or_default()
    };
    parts.extend(status.evaluating.as_ref().map(render::evaluating));
    parts.extend(status.evaluation.as_ref().map(|latest| format!("val {}", score(latest))));
    parts.extend(status.best.as_ref().map(|best| format!("best {}", score(best))));
    // A truncated number would be wrong, so whole parts are left out.
    while parts.len() > 1 && parts.join("  ").chars().count() >= usize::from(width) {
        parts.pop();
    }
    Line::raw(format!(" {}", parts.join("  ")))
}

/// The most important message, if there is one.
fn message(state: &State, theme: Theme) -> Option<(Style, String)> {
    if let Some(error) = state.status_error.as_ref().filter(|_| state.no_answer_for().is_some()) {
        return Some((theme.bad(), error.clone()));
    }
    let status = state.job()?;
    if let Some(drain) = &status.drain {
        return Some((theme.warning(), render::drain(drain)));
    }
    if let Some(pause) = &status.pause {
        let text =
            format!("paused for {}: {}; p resumes", human::duration(pause.seconds), pause.reason);
        return Some((theme.warning(), text));
    }
    if let Some(recovery) = render::current_recovery(status) {
        return Some((theme.warning(), render::recovery(recovery, true)));
    }
    if let Some(problem) = render::save_problem(status) {
        return Some((theme.bad(), format!("saving {problem}")));
    }
    if status.outcome.is_some() {
        return Some((theme.bold(), format!("the job has ended; q quits.  {}", status.reason)));
    }
    let is_idle = status.name.is_empty();
    is_idle.then(|| (theme.accent(), "`baton submit RECIPE` starts a job".to_owned()))
}
