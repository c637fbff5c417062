//! Patterns for the names of parameters.

use glob::Pattern;

/// Patterns such as `features.0.*`, where `*` stands for any text.
#[derive(Clone, Debug, Default)]
pub struct NamePatterns(Vec<Pattern>);

impl NamePatterns {
    /// # Errors
    /// The first that is no pattern, and why.
    pub fn new(texts: &[String]) -> Result<Self, (String, String)> {
        let pattern = |text: &String| {
            Pattern::new(text).map_err(|error| (text.clone(), format!("is no pattern: {error}")))
        };
        texts.iter().map(pattern).collect::<Result<_, _>>().map(Self)
    }

    /// The patterns of a valid recipe; none if one of them is no pattern.
    #[must_use]
    pub fn of(texts: &[String]) -> Self {
        Self::new(texts).unwrap_or_default()
    }

    /// Whether one of them describes `name`.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        self.0.iter().any(|pattern| pattern.matches(name))
    }

    /// The first that describes none of these names: a slip of the pen.
    #[must_use]
    pub fn unused<'a>(&self, names: impl Iterator<Item = &'a str> + Clone) -> Option<&str> {
        let is_unused = |pattern: &&Pattern| !names.clone().any(|name| pattern.matches(name));
        self.0.iter().find(is_unused).map(Pattern::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_describes_whole_names_at_any_depth() {
        let texts = ["features.0.*", "*.bias", "head"].map(str::to_owned);
        let patterns = NamePatterns::new(&texts).unwrap();
        for (name, expected) in [
            ("features.0.conv.weight", true),
            ("features.10.conv.weight", false),
            ("a.b.bias", true),
            ("head", true),
            ("head.weight", false),
        ] {
            assert_eq!(patterns.matches(name), expected, "{name}");
        }
        let names = ["features.0.conv.weight", "a.b.bias"];
        assert_eq!(patterns.unused(names.into_iter()), Some("head"));
        assert_eq!(NamePatterns::new(&["a[".to_owned()]).unwrap_err().0, "a[");
    }
}
