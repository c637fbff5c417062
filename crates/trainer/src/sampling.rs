//! How the next token of a generated text is chosen.

use baton_data::random::Draws;

/// What a model continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Token ids, at least one.
    pub tokens: Vec<i64>,
    /// Number of the text, on which the draws depend.
    pub number: u64,
}

/// How tokens are chosen, and when a text ends.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Most tokens of a generated text.
    pub max_tokens: u32,
    /// Tokens that end a text; they are part of it.
    pub stops: Vec<i64>,
    /// Divisor of scores before a token is drawn; 0 takes the most likely token.
    pub temperature: f64,
    /// Only the most likely tokens are drawn, as many as have this share of the probability together (Holtzman et al.
    /// 2020, arXiv 1904.09751).
    pub top_p: f64,
    /// Seed of the draws, which depend on it, on the number of the text and on the position only.
    pub seed: u64,
}

impl Sampling {
    /// The next token, given the scores of all tokens.
    pub(crate) fn choose(&self, scores: &[f32], random: &mut Draws) -> usize {
        if self.temperature <= 0.0 {
            return most_likely(scores);
        }
        let best = scores.get(most_likely(scores)).copied().map_or(0.0, f64::from);
        let weight = |score: &f32| ((f64::from(*score) - best) / self.temperature).exp();
        let mut tokens: Vec<(usize, f64)> = scores.iter().map(weight).enumerate().collect();
        // Equally likely tokens in the order of their ids.
        tokens.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        let all: f64 = tokens.iter().map(|(_, weight)| weight).sum();
        let mut sum = 0.0;
        let kept = tokens.iter().position(|(_, weight)| {
            sum += weight;
            sum >= self.top_p * all
        });
        tokens.truncate(kept.map_or(tokens.len(), |last| last + 1));
        let drawn = random.uniform() * tokens.iter().map(|(_, weight)| weight).sum::<f64>();
        let mut sum = 0.0;
        let chosen = tokens.iter().find(|(_, weight)| {
            sum += weight;
            sum > drawn
        });
        chosen.or(tokens.last()).map_or(0, |(token, _)| *token)
    }
}

/// The first of the largest scores.
fn most_likely(scores: &[f32]) -> usize {
    let larger =
        |best: usize, token: usize| if scores[token] > scores[best] { token } else { best };
    (0..scores.len()).reduce(larger).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use baton_data::random::RandomPurpose;

    use super::*;

    fn sampling(temperature: f64, top_p: f64) -> Sampling {
        Sampling { max_tokens: 8, stops: Vec::new(), temperature, top_p, seed: 1 }
    }

    /// How often each of three tokens is drawn in 3,000 draws.
    fn counts(sampling: &Sampling, scores: [f32; 3]) -> [u32; 3] {
        let mut counts = [0; 3];
        let mut random = Draws::new(sampling.seed, 0, 0, RandomPurpose::Generate);
        for _ in 0..3000 {
            counts[sampling.choose(&scores, &mut random)] += 1;
        }
        counts
    }

    #[test]
    fn tokens_are_drawn_as_often_as_their_probability_says() {
        // 1/2, 1/3, 1/6
        let scores = [3_f32.ln(), 2_f32.ln(), 0.0];
        let near = |counts: [u32; 3], expected: [u32; 3]| {
            let is_near = |(found, wanted): (&u32, &u32)| found.abs_diff(*wanted) < 90;
            assert!(counts.iter().zip(&expected).all(is_near), "{counts:?}");
        };
        near(counts(&sampling(1.0, 1.0), scores), [1500, 1000, 500]);
        near(counts(&sampling(0.5, 1.0), scores), [1929, 857, 214]);
        near(counts(&sampling(1.0, 0.8), scores), [1800, 1200, 0]);
        assert_eq!(counts(&sampling(1.0, 0.0), scores), [3000, 0, 0]);
        assert_eq!(counts(&sampling(0.0, 1.0), [1.0, 2.0, 2.0]), [0, 3000, 0]);
    }
}
