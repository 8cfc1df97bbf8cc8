"""`lmcache-xpu bench` and `report`: what hits and stores cost here, and what tiers are worth."""
