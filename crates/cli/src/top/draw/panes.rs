//! Panes with text: the job's checkpoints, cost and recoveries; events; the log.

use baton_proto::v1::{GetStatusResponse, StreamLogsResponse};
use ratatui::{
    Frame,
    layout::Rect,
    text::{Line, Span},
    widgets::{Paragraph, Wrap},
};

use super::block;
use crate::{
    clean::clean,
    human,
    render::{self, Day, Paint},
    top::{
        state::{Pane, State},
        theme::Theme,
    },
};

/// Checkpoints, cost, incidents and recoveries, the newest first.
pub(super) fn job(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme) {
    let block = block(" Job: checkpoints, cost, recoveries ", Some(Pane::Job), state, theme);
    let lines = state.job().map(|status| job_lines(status, theme)).unwrap_or_default();
    let first = state.scrolled[Pane::Job as usize].min(lines.len().saturating_sub(1));
    let first = u16::try_from(first).unwrap_or(u16::MAX);
    let text = Paragraph::new(lines).wrap(Wrap { trim: false });
    frame.render_widget(text.block(block).scroll((first, 0)), area);
}

fn job_lines(status: &GetStatusResponse, theme: Theme) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    let mut add = |name: &str, style, text: Option<String>| {
        lines.extend(text.map(|text| {
            Line::from_iter([
                Span::styled(format!("{name:<11}"), theme.dim()),
                Span::styled(clean(&text).into_owned(), style),
            ])
        }));
    };
    let normal = ratatui::style::Style::new();
    add("deadline", theme.warning(), status.drain.as_ref().map(render::drain));
    add("checkpoint", normal, render::checkpoint(status).or(Some("none yet".to_owned())));
    let local = status.local_checkpoint.as_ref().map(render::local_checkpoint);
    add("local", normal, local);
    add(
        "saving",
        theme.bad(),
        status.save_problem.as_ref().map(|problem| format!("FAILS: {problem}")),
    );
    let spending = status.spending.as_ref();
    add("spent", normal, spending.and_then(render::spending));
    add("cost", normal, spending.and_then(render::rates));
    add("lost", normal, spending.and_then(render::lost));
    add("evaluation", normal, status.evaluation.as_ref().map(render::evaluation));
    add("best", normal, status.best.as_ref().map(render::evaluation));
    add("started", normal, status.began_with.clone());
    let ended = status.outcome.as_ref().map(|outcome| {
        let failure = outcome.failure.as_ref().map_or(&outcome.reason, |failure| &failure.message);
        let kind = outcome.kind().name().replace('_', " ");
        if failure.is_empty() { kind } else { format!("{kind}: {failure}") }
    });
    add("ended", theme.bold(), ended);
    for incident in status.incidents.iter().rev() {
        add("diverged", theme.bad(), Some(render::incident(incident)));
    }
    let current = render::current_recovery(status);
    let total = status.recoveries_total;
    add(
        "recoveries",
        normal,
        (total > 0).then(|| format!("{} in total, newest first", human::grouped(total))),
    );
    for recovery in status.recoveries.iter().rev() {
        let style = if current == Some(recovery) { theme.warning() } else { normal };
        let text = render::recovery(recovery, current == Some(recovery));
        add(&human::ago(recovery.age_seconds), style, Some(text));
    }
    lines
}

/// Events, the newest at the bottom.
pub(super) fn events(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme) {
    let block = block(" Events ", None, state, theme);
    let rows = usize::from(block.inner(area).height);
    let first = state.events.len().saturating_sub(rows);
    let lines = state.events.iter().skip(first).map(|event| {
        use baton_proto::v1::watch_events_response::Kind;
        let style = match event.kind() {
            Kind::NodeLost | Kind::SaveFailed | Kind::RankFailed | Kind::Diverged => theme.bad(),
            Kind::Draining | Kind::NodeLeaves | Kind::Paused | Kind::Straggler | Kind::Budget => {
                theme.warning()
            }
            _ => ratatui::style::Style::new(),
        };
        Line::styled(format!(" {}", render::event(event, Day::Hidden, Paint::Plain)), style)
    });
    let lines: Vec<Line<'_>> = lines.collect();
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

/// Log lines, the newest at the bottom unless the user has scrolled up.
pub(super) fn log(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme) {
    let title = match state.selected_rank().filter(|_| state.one_rank) {
        Some(rank) => format!(" Log of rank {rank}; f: all "),
        None => " Log of all; f: selected rank ".to_owned(),
    };
    let block = block(title, Some(Pane::Log), state, theme);
    let rows = usize::from(block.inner(area).height);
    let scrolled = state.scrolled[Pane::Log as usize];
    let mut lines: Vec<Line<'_>> = Vec::new();
    for line in state.shown_lines().rev().skip(scrolled) {
        if lines.len() >= rows {
            break;
        }
        lines.push(log_line(line, theme));
        if line.left_out > 0 {
            let text = format!("… {} left out", human::count(line.left_out, "line"));
            lines.push(Line::styled(format!("{:>11} │ {text}", ""), theme.dim()));
        }
    }
    lines.truncate(rows);
    lines.reverse();
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

fn log_line(line: &StreamLogsResponse, theme: Theme) -> Line<'static> {
    let writer = render::writer(line);
    Line::from_iter([
        Span::styled(format!("{writer:>11} │ "), theme.rank(line.rank)),
        Span::raw(clean(&line.line).into_owned()),
    ])
}
