//! Log-mel spectrograms, by the definition of torchaudio's `MelSpectrogram` with its defaults (a periodic Hann window as long as
//! the transform, frames centred by reflection, the power, HTK's mel scale from 0 to half the rate, triangles of height 1) and
//! `AmplitudeToDB("power")`: decibels, at least -100.

use rustfft::{FftPlanner, num_complex::Complex};

/// Smallest power that differs from silence.
const MIN_POWER: f64 = 1e-10;
/// Longest transform, samples.
const MAX_TRANSFORM: usize = 1 << 16;

/// The settings of a spectrogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MelSettings {
    /// Samples per second.
    pub(super) rate: u32,
    /// Samples of a transform.
    transform: usize,
    /// Samples from one frame to the next.
    hop: usize,
    pub(super) bands: usize,
    pub(super) frames: usize,
}

/// `RATE,TRANSFORM,HOP,BANDS,FRAMES`
impl std::str::FromStr for MelSettings {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Result<Vec<u32>, _> =
            text.split(',').map(|number| number.trim().parse()).collect();
        match numbers.as_deref() {
            Ok([rate, rest @ ..]) if rest.len() == 4 => {
                let [transform, hop, bands, frames] = [0, 1, 2, 3].map(|at| rest[at] as usize);
                let is_valid = *rate > 0 && bands > 0 && frames > 0;
                match (2..=MAX_TRANSFORM).contains(&transform) && (1..=transform).contains(&hop) {
                    true if is_valid => Ok(Self { rate: *rate, transform, hop, bands, frames }),
                    _ => Err(format!(
                        "{text}: TRANSFORM is 2 to {MAX_TRANSFORM}, HOP 1 to TRANSFORM, and the others are at least 1"
                    )),
                }
            }
            _ => Err(format!("{text:?} is not RATE,TRANSFORM,HOP,BANDS,FRAMES: whole numbers")),
        }
    }
}

impl MelSettings {
    /// The spectrogram of a signal of one channel, shape (bands, frames). A signal that is shorter is followed by silence; one
    /// that is [longer](Self::longest) loses its end.
    pub(super) fn spectrogram(&self, signal: &[f32]) -> Vec<f32> {
        let Self { transform, hop, bands, frames, .. } = *self;
        // Padded with zeros, so that it has all frames and can be reflected at both ends.
        let half = transform / 2;
        let samples = signal.len().max((frames - 1) * hop + transform % 2).max(half + 1);
        let last = samples - 1;
        let reflected = |position: isize| {
            let position = position.unsigned_abs();
            let position = if position > last { 2 * last - position } else { position };
            signal.get(position).copied().unwrap_or_default()
        };

        let window = hann(transform);
        let filters = self.filters();
        let fft = FftPlanner::new().plan_fft_forward(transform);
        let mut buffer = vec![Complex::default(); transform];
        let mut scratch = vec![Complex::default(); fft.get_inplace_scratch_len()];
        let mut decibels = vec![0.0; bands * frames];
        for frame in 0..frames {
            let start = (frame * hop) as isize - half as isize;
            for (at, (place, weight)) in buffer.iter_mut().zip(&window).enumerate() {
                *place = Complex::new(reflected(start + at as isize) * weight, 0.0);
            }
            fft.process_with_scratch(&mut buffer, &mut scratch);
            for (band, filter) in filters.iter().enumerate() {
                let powers = buffer[filter.first..].iter().zip(&filter.weights);
                let power: f64 =
                    powers.map(|(value, weight)| f64::from(value.norm_sqr()) * weight).sum();
                // Not the system's function, whose last bits depend on its version.
                let level = 10.0 * libm::log10(power.max(MIN_POWER));
                decibels[band * frames + frame] = level as f32;
            }
        }
        decibels
    }

    /// Samples of the longest signal that makes no more frames.
    pub(super) fn longest(&self) -> usize {
        self.frames * self.hop - 1 + self.transform % 2
    }

    fn filters(&self) -> Vec<BandFilter> {
        // As in torchaudio: a whole number of hertz, and the frequency of the last bin, also where the length is odd.
        let top = f64::from(self.rate / 2);
        let mel = |hertz: f64| 2595.0 * libm::log10(1.0 + hertz / 700.0);
        let hertz = |mel: f64| 700.0 * (libm::pow(10.0, mel / 2595.0) - 1.0);
        let corner = |number: usize| hertz(mel(top) * number as f64 / (self.bands + 1) as f64);
        let bins = self.transform / 2 + 1;
        let hertz_of_bin = |bin: usize| top * bin as f64 / (bins - 1) as f64;
        let filter = |band: usize| {
            let (low, middle, high) = (corner(band), corner(band + 1), corner(band + 2));
            let weight = |bin: usize| {
                let rising = (hertz_of_bin(bin) - low) / (middle - low);
                let falling = (high - hertz_of_bin(bin)) / (high - middle);
                rising.min(falling).max(0.0)
            };
            let first = (0..bins).find(|bin| weight(*bin) > 0.0).unwrap_or(bins - 1);
            let weights = (first..bins).map(weight).take_while(|weight| *weight > 0.0).collect();
            BandFilter { first, weights }
        };
        (0..self.bands).map(filter).collect()
    }
}

/// What a band takes of the transform's powers.
struct BandFilter {
    /// The first bin.
    first: usize,
    weights: Vec<f64>,
}

/// A periodic Hann window.
fn hann(len: usize) -> Vec<f32> {
    let angle = |at: usize| 2.0 * std::f64::consts::PI * at as f64 / len as f64;
    (0..len).map(|at| (0.5 - 0.5 * libm::cos(angle(at))) as f32).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use flate2::read::GzDecoder;

    use super::*;

    /// A signal of 1,000 samples and its spectrograms by torchaudio, from scripts/parity/mel.py.
    fn recorded() -> Vec<f32> {
        let file = include_bytes!("../../tests/fixtures/mel.f32.gz");
        let mut bytes = Vec::new();
        GzDecoder::new(&file[..]).read_to_end(&mut bytes).unwrap();
        bytes.chunks(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    #[test]
    fn spectrograms_are_those_of_torchaudio() {
        let recorded = recorded();
        let (signal, mut rest) = recorded.split_at(1_000);
        let cases: [(&str, usize); 4] = [
            ("8000,256,100,20", 11),
            ("16000,400,160,64", 7),
            ("8000,255,60,13", 17),
            ("11025,512,200,40", 6),
        ];
        for (settings, frames) in cases {
            let settings: MelSettings = format!("{settings},{frames}").parse().unwrap();
            let found = settings.spectrogram(signal);
            let (expected, others) = rest.split_at(found.len());
            rest = others;
            let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
            let largest = differences.fold(0.0_f32, f32::max);
            assert!(largest < 2e-3, "{settings:?}: {largest} dB");
        }
        assert!(rest.is_empty());
    }

    #[test]
    fn a_short_signal_is_followed_by_silence_and_a_long_one_refused() {
        let settings: MelSettings = "100,8,4,3,5".parse().unwrap();
        let long = settings.spectrogram(&[1.0; 16]);
        let mut short = [0.0; 16];
        short[..3].fill(1.0);
        assert_eq!(settings.spectrogram(&[1.0; 3]), settings.spectrogram(&short));
        assert_eq!(long.len(), 15);
        assert_eq!(settings.longest(), 19);
        assert_eq!(settings.spectrogram(&[]), [-100.0; 15]);
    }

    #[test]
    fn a_signal_shorter_than_an_odd_transform_is_reflected_in_silence() {
        let settings: MelSettings = "8000,255,128,13,2".parse().unwrap();
        for samples in [0, 1, 127, 128, 129] {
            let levels = settings.spectrogram(&vec![0.5; samples]);
            assert!(levels.len() == 26 && levels.iter().all(|level| level.is_finite()));
        }
        // Silence takes no memory.
        let long: MelSettings = "16000,65536,65536,1,3".parse().unwrap();
        assert_eq!(long.spectrogram(&[]), [-100.0; 3]);
    }

    #[test]
    fn settings_that_make_no_spectrogram_are_refused() {
        let refused = |text: &str| text.parse::<MelSettings>().unwrap_err();
        assert!(refused("16000,400,160,64").contains("is not RATE,TRANSFORM,HOP,BANDS,FRAMES"));
        assert!(refused("16000,400,160,64,-1").contains("whole numbers"));
        for text in ["0,400,160,64,9", "16000,1,1,64,9", "16000,400,401,64,9", "16000,400,0,64,9"] {
            assert!(refused(text).contains("at least 1"), "{text}");
        }
    }
}
