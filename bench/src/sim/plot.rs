//! Line plots as SVG, simple enough to read: axes, a grid, lines, a legend. Colours are the page's, so that both light and dark work.

use std::fmt::Write;

#[derive(Clone, Debug, Default)]
pub struct Plot {
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    pub lines: Vec<Line>,
}

#[derive(Clone, Debug, Default)]
pub struct Axis {
    pub label: String,
    pub scale: Scale,
    /// The least and the most; by default those of the points, and 0 on a linear axis.
    pub range: Option<(f64, f64)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Scale {
    #[default]
    Linear,
    Log,
}

#[derive(Clone, Debug, Default)]
pub struct Line {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    /// Whether to mark the points, as they were measured one by one.
    pub dots: bool,
    /// Intervals of points, where known: x, low and high.
    pub intervals: Vec<(f64, f64, f64)>,
}

/// The drawing's size and its margins: left, right, top, bottom.
const SIZE: (f64, f64) = (640.0, 360.0);
const MARGINS: (f64, f64, f64, f64) = (56.0, 12.0, 12.0, 44.0);
/// The number of colours that the page defines, `--c0` and so on.
const COLORS: usize = 8;
/// The most points of one line: a phone's screen has no more.
const POINTS_MAX: usize = 600;

impl Plot {
    pub fn figure(&self) -> String {
        let (x, y) = (Mapped::new(&self.x, self.values(|point| point.0)), Mapped::new(&self.y, self.values(|point| point.1)));
        let (left, right, top, bottom) = (MARGINS.0, SIZE.0 - MARGINS.1, MARGINS.2, SIZE.1 - MARGINS.3);
        let at = |point: (f64, f64)| (left + x.place(point.0) * (right - left), bottom - y.place(point.1) * (bottom - top));
        let mut svg = format!("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">", SIZE.0, SIZE.1, escape(&self.title));
        for tick in x.ticks() {
            let (place, _) = at((tick, y.low));
            write!(svg, "<line class=\"grid\" x1=\"{place:.1}\" x2=\"{place:.1}\" y1=\"{top}\" y2=\"{bottom}\"/>").expect("a string");
            write!(svg, "<text x=\"{place:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>", bottom + 16.0, short(tick)).expect("a string");
        }
        for tick in y.ticks() {
            let (_, place) = at((x.low, tick));
            write!(svg, "<line class=\"grid\" x1=\"{left}\" x2=\"{right}\" y1=\"{place:.1}\" y2=\"{place:.1}\"/>").expect("a string");
            write!(svg, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>", left - 6.0, place + 4.0, short(tick))
                .expect("a string");
        }
        let (middle, end) = ((left + right) / 2.0, SIZE.1 - 6.0);
        write!(svg, "<text x=\"{middle}\" y=\"{end}\" text-anchor=\"middle\">{}</text>", escape(&self.x.label)).expect("a string");
        let (rise, label) = ((top + bottom) / 2.0, escape(&self.y.label));
        write!(svg, "<text x=\"13\" y=\"{rise}\" text-anchor=\"middle\" transform=\"rotate(-90 13 {rise})\">{label}</text>")
            .expect("a string");
        for (number, line) in self.lines.iter().enumerate() {
            let every = line.points.len().div_ceil(POINTS_MAX).max(1);
            let places: Vec<(f64, f64)> = line.points.iter().step_by(every).map(|&point| at(point)).collect();
            let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let color = number % COLORS;
            write!(svg, "<polyline style=\"stroke:var(--c{color})\" points=\"{}\"/>", path.join(" ")).expect("a string");
            for &(x, low, high) in &line.intervals {
                let ((x, low), (_, high)) = (at((x, low)), at((x, high)));
                write!(svg, "<line style=\"stroke:var(--c{color})\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{low:.1}\" y2=\"{high:.1}\"/>")
                    .expect("a string");
            }
            for (x, y) in places.iter().filter(|_| line.dots) {
                write!(svg, "<circle style=\"fill:var(--c{color})\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>").expect("a string");
            }
        }
        svg += "</svg>";
        let legend: Vec<String> = self
            .lines
            .iter()
            .enumerate()
            .map(|(number, line)| format!("<span><i style=\"background:var(--c{})\"></i>{}</span>", number % COLORS, escape(&line.name)))
            .collect();
        format!("<figure><figcaption>{}</figcaption>{svg}<p class=\"legend\">{}</p></figure>", escape(&self.title), legend.join(" "))
    }

    fn values(&self, of: fn(&(f64, f64)) -> f64) -> impl Iterator<Item = f64> {
        self.lines.iter().flat_map(|line| &line.points).map(of).filter(|value| value.is_finite())
    }
}

/// An axis with its range.
struct Mapped {
    low: f64,
    high: f64,
    scale: Scale,
}

impl Mapped {
    fn new(axis: &Axis, values: impl Iterator<Item = f64>) -> Self {
        let scale = axis.scale;
        let values: Vec<f64> = values.filter(|value| scale == Scale::Linear || *value > 0.0).collect();
        let least = if scale == Scale::Linear { 0.0 } else { f64::INFINITY };
        let (low, high) =
            axis.range.unwrap_or_else(|| (values.iter().copied().fold(least, f64::min), values.iter().copied().fold(0.0, f64::max)));
        let low = if low.is_finite() { low } else { 1.0 };
        Self { low, high: if high > low { high } else { low + 1.0 }, scale }
    }

    /// The place of a value, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let share = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value.max(self.low) / self.low).ln() / (self.high / self.low).ln(),
        };
        share.clamp(0.0, 1.0)
    }

    fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let step = nice((self.high - self.low) / 5.0);
                let first = (self.low / step).ceil() as i64;
                (first..).map(|n| n as f64 * step).take_while(|tick| *tick <= self.high * (1.0 + 1e-9)).collect()
            }
            Scale::Log => {
                let decades = (self.low.log10().floor() as i32..=self.high.log10().ceil() as i32).map(|power| 10f64.powi(power));
                let fine = self.high / self.low < 50.0;
                let marks: &[f64] = if fine { &[1.0, 2.0, 5.0] } else { &[1.0] };
                decades
                    .flat_map(|decade| marks.iter().map(move |mark| mark * decade))
                    .filter(|tick| (self.low..=self.high).contains(tick))
                    .collect()
            }
        }
    }
}

/// The least number of at least `step` that is 1, 2 or 5 times a power of ten.
fn nice(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|mark| mark * power).find(|mark| *mark >= step).unwrap_or(step)
}

fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        size if size >= 1e6 => format!("{}M", trimmed(value / 1e6)),
        size if size >= 1e4 => format!("{}k", trimmed(value / 1e3)),
        _ => trimmed(value),
    }
}

fn trimmed(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        let axis = |low, high, scale| Mapped { low, high, scale }.ticks();
        assert_eq!(axis(0.0, 7.3, Scale::Linear), [0.0, 2.0, 4.0, 6.0]);
        assert_eq!(axis(0.5, 900.0, Scale::Log), [1.0, 10.0, 100.0]);
        assert_eq!(axis(1.0, 8.0, Scale::Log), [1.0, 2.0, 5.0]);
        assert_eq!([0.25, 1500.0, 25_000.0, 2e6].map(short), ["0.25", "1500", "25k", "2M"]);
    }

    #[test]
    fn lines_stay_inside_whatever_their_points() {
        let points = vec![(0.0, 1.0), (1.0, f64::INFINITY), (2.0, -5.0)];
        let line = Line { name: "a<b".into(), points, dots: true, intervals: vec![(0.0, -1.0, f64::INFINITY)] };
        let axis = |scale| Axis { scale, ..Axis::default() };
        for (x, y) in [(Scale::Linear, Scale::Linear), (Scale::Log, Scale::Log)] {
            let figure = Plot { x: axis(x), y: axis(y), lines: vec![line.clone()], ..Plot::default() }.figure();
            assert!(!figure.contains("NaN") && !figure.contains("inf") && figure.contains("a&lt;b"), "{figure}");
        }
        assert!(Plot::default().figure().contains("<svg"), "nothing to draw is no reason to fail");
    }
}
