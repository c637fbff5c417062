//! Numbers that depend on the number of samples: sizes of tensors, and what operators cost.

use std::collections::BTreeMap;

/// A number for a batch of n samples: `fixed + n · per_sample`. Too large numbers become the largest one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// The part that does not depend on the number of samples.
    pub fixed: u64,
    /// The part of every sample.
    pub per_sample: u64,
}

impl Amount {
    /// A number that does not depend on the number of samples.
    #[must_use]
    pub fn fixed(number: u64) -> Self {
        Self { fixed: number, per_sample: 0 }
    }

    /// Its value for a batch.
    #[must_use]
    pub fn at(self, samples: u64) -> u64 {
        self.fixed.saturating_add(self.per_sample.saturating_mul(samples))
    }

    #[must_use]
    pub(crate) fn plus(self, other: Self) -> Self {
        self.each(|fixed| fixed.saturating_add(other.fixed), other.per_sample)
    }

    #[must_use]
    pub(crate) fn times(self, factor: u64) -> Self {
        Self {
            fixed: self.fixed.saturating_mul(factor),
            per_sample: self.per_sample.saturating_mul(factor),
        }
    }

    /// Rounded down; 0 if `divisor` is 0.
    #[must_use]
    pub(crate) fn over(self, divisor: u64) -> Self {
        let over = |number: u64| number.checked_div(divisor).unwrap_or_default();
        Self { fixed: over(self.fixed), per_sample: over(self.per_sample) }
    }

    /// `None` if the product grows with the square of the number of samples.
    pub(crate) fn product(self, other: Self) -> Option<Self> {
        match (self.per_sample, other.per_sample) {
            (_, 0) => Some(self.times(other.fixed)),
            (0, _) => Some(other.times(self.fixed)),
            _ => None,
        }
    }

    fn each(self, fixed: impl FnOnce(u64) -> u64, per_sample: u64) -> Self {
        Self { fixed: fixed(self.fixed), per_sample: self.per_sample.saturating_add(per_sample) }
    }
}

impl std::iter::Sum for Amount {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::default(), Self::plus)
    }
}

/// A size while it is computed; differences may be negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinearSize {
    fixed: i64,
    per_sample: i64,
}

impl LinearSize {
    /// The number of samples.
    pub(crate) const SAMPLES: Self = Self { fixed: 0, per_sample: 1 };

    pub(crate) fn fixed(number: i64) -> Self {
        Self { fixed: number, per_sample: 0 }
    }

    /// `None` if it can be negative.
    pub(crate) fn amount(self) -> Option<Amount> {
        let [fixed, per_sample] = [self.fixed, self.per_sample].map(u64::try_from);
        Some(Amount { fixed: fixed.ok()?, per_sample: per_sample.ok()? })
    }

    fn constant(self) -> Option<i64> {
        (self.per_sample == 0).then_some(self.fixed)
    }

    fn plus(self, other: Self) -> Option<Self> {
        Some(Self {
            fixed: self.fixed.checked_add(other.fixed)?,
            per_sample: self.per_sample.checked_add(other.per_sample)?,
        })
    }

    fn times(self, other: Self) -> Option<Self> {
        let (of, factor) = match (self.constant(), other.constant()) {
            (_, Some(factor)) => (self, factor),
            (Some(factor), None) => (other, factor),
            (None, None) => return None,
        };
        Some(Self {
            fixed: of.fixed.checked_mul(factor)?,
            per_sample: of.per_sample.checked_mul(factor)?,
        })
    }

    /// Quotient and remainder, where they are known for every number of samples.
    fn divided(self, other: Self) -> Option<(Self, Self)> {
        if let Some(divisor) = other.constant().filter(|divisor| *divisor > 0) {
            let is_whole = self.per_sample % divisor == 0;
            let quotient = Self {
                fixed: self.fixed.div_euclid(divisor),
                per_sample: self.per_sample / divisor,
            };
            return is_whole.then_some((quotient, Self::fixed(self.fixed.rem_euclid(divisor))));
        }
        let is_multiple = other.per_sample > 0 && self.per_sample % other.per_sample == 0;
        let factor = is_multiple.then(|| Self::fixed(self.per_sample / other.per_sample))?;
        (other.times(factor)? == self).then_some((factor, Self::fixed(0)))
    }

    fn power(self, exponent: i64) -> Option<Self> {
        const LARGEST_EXPONENT: i64 = 16;
        let factors = (0..=LARGEST_EXPONENT).contains(&exponent).then_some(0..exponent)?;
        { factors }.try_fold(Self::fixed(1), |product, _| product.times(self))
    }

    /// The smaller and the larger one, where this is the same for every number of samples.
    fn sorted(self, other: Self) -> Option<(Self, Self)> {
        let is_below = |a: Self, b: Self| {
            let of_one = |size: Self| size.fixed.checked_add(size.per_sample);
            Some(of_one(a)? <= of_one(b)? && a.per_sample <= b.per_sample)
        };
        match (is_below(self, other)?, is_below(other, self)?) {
            (true, _) => Some((self, other)),
            (_, true) => Some((other, self)),
            _ => None,
        }
    }
}

/// The symbols of a program's sizes.
pub(crate) type Symbols = BTreeMap<String, LinearSize>;

/// The value of an expression as `torch.export` writes it: calls such as
/// `Mul(Integer(49), Symbol('s77', positive=True, integer=True))`. `None` for unknown symbols and functions, and for what
/// does not grow linearly with the number of samples.
pub(crate) fn evaluated(text: &str, symbols: &Symbols) -> Option<LinearSize> {
    let mut reader = ExpressionReader { rest: text, symbols };
    let value = reader.expression(0)?;
    reader.rest.trim().is_empty().then_some(value)
}

/// Name of the symbol, if the expression is a single one: `Symbol('s77', positive=True, integer=True)`, or just `s77`.
pub(crate) fn symbol(text: &str) -> &str {
    text.split('\'').nth(1).unwrap_or(text)
}

struct ExpressionReader<'a> {
    rest: &'a str,
    symbols: &'a Symbols,
}

/// Deeper expressions are not evaluated: the file could exhaust the stack.
const MAX_DEPTH: u32 = 32;

impl<'a> ExpressionReader<'a> {
    fn expression(&mut self, depth: u32) -> Option<LinearSize> {
        if depth > MAX_DEPTH {
            return None;
        }
        let name = self.word();
        if !self.eat('(') {
            let number = name.parse().ok().map(LinearSize::fixed);
            return number.or_else(|| self.symbols.get(name).copied());
        }
        if name == "Symbol" {
            let (quoted, rest) = self.rest.split_once(')')?;
            self.rest = rest;
            return self.symbols.get(quoted.split('\'').nth(1)?).copied();
        }
        let mut value = self.expression(depth + 1)?;
        let mut is_single = true;
        while self.eat(',') {
            let next = self.expression(depth + 1)?;
            is_single = false;
            value = match name {
                "Add" => value.plus(next)?,
                "Mul" => value.times(next)?,
                "FloorDiv" | "CleanDiv" => value.divided(next)?.0,
                "Mod" | "PythonMod" => value.divided(next)?.1,
                "Pow" | "PowByNatural" => value.power(next.constant()?)?,
                "Max" => value.sorted(next)?.1,
                "Min" => value.sorted(next)?.0,
                _ => return None,
            };
        }
        let is_known = !is_single || name == "Integer";
        (self.eat(')') && is_known).then_some(value)
    }

    /// Letters, digits, underscores, signs.
    fn word(&mut self) -> &'a str {
        let text = self.rest.trim_start();
        let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
        let end = text.find(|c| !is_part(c)).unwrap_or(text.len());
        let (word, rest) = text.split_at(end);
        self.rest = rest;
        word
    }

    fn eat(&mut self, expected: char) -> bool {
        let rest = self.rest.trim_start().strip_prefix(expected);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLES: &str = "Symbol('s77', positive=True, integer=True)";

    fn value(text: &str) -> Option<LinearSize> {
        let symbols = [("s77", LinearSize::SAMPLES), ("s3", LinearSize::fixed(224))];
        let symbols = symbols.map(|(name, value)| (name.to_owned(), value));
        evaluated(&text.replace("N", SAMPLES).replace("SIDE", "Symbol('s3')"), &symbols.into())
    }

    fn of(fixed: i64, per_sample: i64) -> Option<LinearSize> {
        Some(LinearSize { fixed, per_sample })
    }

    #[test]
    fn sizes_that_grow_with_the_samples_are_exact() {
        for (text, expected) in [
            ("N", of(0, 1)),
            ("s77", of(0, 1)),
            ("49", of(49, 0)),
            ("Mul(Integer(49), N)", of(0, 49)),
            ("Add(Mul(Integer(2), N), Integer(-1))", of(-1, 2)),
            ("FloorDiv(Mul(Integer(64), N), Integer(64))", of(0, 1)),
            ("FloorDiv(Add(Mul(Integer(4), N), Integer(7)), Integer(2))", of(3, 2)),
            ("FloorDiv(Mul(Integer(8), N), N)", of(8, 0)),
            ("Mod(Mul(Integer(49), N), Integer(49))", of(0, 0)),
            ("Add(FloorDiv(Add(SIDE, Integer(-1)), Integer(2)), Integer(1))", of(112, 0)),
            ("Pow(SIDE, Integer(2))", of(50_176, 0)),
            ("Max(Integer(1), SIDE)", of(224, 0)),
            ("Min(Integer(768), Mul(Integer(768), N))", of(768, 0)),
            ("Max(N, Integer(1))", of(0, 1)),
        ] {
            assert_eq!(value(text), expected, "{text}");
        }
    }

    #[test]
    fn other_sizes_are_not_known() {
        for text in [
            "",
            "s5",
            "Mul(N, N)",
            "Pow(N, Integer(2))",
            "FloorDiv(N, Integer(2))",
            "FloorDiv(SIDE, Integer(0))",
            "Max(N, Integer(2))",
            "Where(N, Integer(1))",
            "Mul(Integer(9223372036854775807), Integer(2))",
            "Pow(SIDE, Integer(9223372036854775807))",
            "Mul(Integer(2), N",
            "Mul(Integer(2), N) 3",
            "Symbol(",
        ] {
            assert_eq!(value(text), None, "{text}");
        }
        assert_eq!(value(&"Add(".repeat(100_000)), None);
    }

    #[test]
    fn amounts_never_overflow() {
        let most = Amount { fixed: u64::MAX, per_sample: u64::MAX };
        assert_eq!(most.plus(most).times(3), most);
        assert_eq!(most.at(u64::MAX), u64::MAX);
        assert_eq!(most.product(Amount::fixed(2)), Some(most));
        assert_eq!(most.product(most), None);
        assert_eq!(most.over(0), Amount::default());
    }
}
