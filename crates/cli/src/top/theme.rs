//! Colours of the dashboard, of the 256-colour palette. The colour-blind can distinguish them (Okabe and Ito), and no
//! information is shown by colour alone.

use baton_proto::v1::get_status_response::Phase;
use ratatui::style::{Color, Modifier, Style};

/// Whether to use colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Theme {
    Colours,
    /// See <https://no-color.org>.
    Plain,
}

const GREEN: u8 = 36;
const ORANGE: u8 = 214;
const VERMILION: u8 = 166;
const SKY: u8 = 74;
const PURPLE: u8 = 175;

impl Theme {
    fn coloured(self, colour: u8) -> Style {
        match self {
            Self::Colours => Style::new().fg(Color::Indexed(colour)),
            Self::Plain => Style::new(),
        }
    }

    pub(super) fn good(self) -> Style {
        self.coloured(GREEN)
    }

    pub(super) fn warning(self) -> Style {
        self.coloured(ORANGE).add_modifier(Modifier::BOLD)
    }

    pub(super) fn bad(self) -> Style {
        self.coloured(VERMILION).add_modifier(Modifier::BOLD)
    }

    /// Style of what should stand out.
    pub(super) fn accent(self) -> Style {
        self.coloured(SKY)
    }

    /// Style of a second curve.
    pub(super) fn other(self) -> Style {
        self.coloured(PURPLE)
    }

    pub(super) fn dim(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    pub(super) fn bold(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    pub(super) fn selected(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    pub(super) fn phase(self, phase: Phase) -> Style {
        match phase {
            Phase::Training => self.good(),
            Phase::Backoff | Phase::Detecting | Phase::Draining | Phase::Paused => self.warning(),
            Phase::Ended => self.bold(),
            _ => self.accent(),
        }
    }

    /// Style of a rank; neighbouring ranks have different colours.
    pub(super) fn rank(self, rank: Option<u32>) -> Style {
        const COLOURS: [u8; 5] = [SKY, ORANGE, GREEN, PURPLE, VERMILION];
        match rank {
            Some(rank) => self.coloured(COLOURS[rank as usize % COLOURS.len()]),
            None => self.bold(),
        }
    }
}
